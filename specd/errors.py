"""One tree of errors. Every class has a stable `code`; a message says what, which value, and what to do."""

from __future__ import annotations


class SpecdError(Exception):
    """Root of every error that specd raises on purpose.

    `code` is stable: logs, error bodies and tests rely on it.
    """

    code = "internal_error"


class ConfigError(SpecdError):
    """A configuration value that cannot be used (exit code 78)."""

    code = "config_error"


class UsageError(SpecdError):
    """A command line that cannot be meant: options that do not go together, or values out of range (exit code 2)."""

    code = "usage_error"


class AddressInUseError(SpecdError):
    """Somebody else listens where the daemon was to listen. It may be gone at the next try: not a ConfigError."""

    code = "address_in_use"


class JournalInUseError(SpecdError):
    """Another daemon writes the journal. It may be gone at the next try: not a ConfigError."""

    code = "journal_in_use"


class ModelError(SpecdError):
    """A checkpoint, tokenizer or chat template that cannot be loaded or is not supported."""

    code = "model_error"


class FetchError(ModelError):
    """A model that had to be downloaded and could not be; the next try may succeed (exit code 1, not 78)."""

    code = "fetch_error"


class RankError(SpecdError):
    """One of several training processes failed, or lost the others. It names the rank."""

    code = "rank_error"


class OutputError(SpecdError):
    """A result that cannot be written: a full disk, a place that is read-only."""

    code = "output_error"


class DraftError(SpecdError):
    """A drafter that does not fit the target; both sides are named."""

    code = "draft_error"


class RequestError(SpecdError):
    """A request that is refused before it is accepted.

    `param` is the dotted path of the offending field (`messages[2].content`) or None.
    """

    code = "invalid_request"

    def __init__(self, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class OverloadedError(SpecdError):
    """Refused because of what is accepted already; worth another try after `retry_after_s`."""

    code = "overloaded"

    def __init__(self, message: str = "", *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFullError(OverloadedError):
    """The waiting queue is at its limit."""

    code = "queue_full"


class RateLimitError(OverloadedError):
    """An API key is at its limit."""

    code = "rate_limit"


class DrainingError(SpecdError):
    """The engine accepts nothing more because it is shutting down."""

    code = "draining"


class EngineError(SpecdError):
    """A fault while an accepted request was computed. The text sent to clients is fixed."""

    code = "engine_error"


class GrammarError(EngineError):
    """A request whose grammar and other parameters leave no token to go on with, or whose grammar grew too complex."""

    code = "no_token_allowed"


class NonFiniteLogitsError(EngineError):
    """The target's logits of one row were NaN, or everything was masked out."""

    code = "non_finite_logits"


class AbortedError(SpecdError):
    """An accepted request ended by its client, an operator or a shutdown."""

    code = "aborted"


class QueueTimeoutError(AbortedError):
    """Its time ran out before the first token."""

    code = "queue_timeout"


class DeadlineError(AbortedError):
    """Its time ran out after the first token."""

    code = "deadline_exceeded"


class ShutdownError(AbortedError):
    """It was cut off because the server stopped."""

    code = "shutting_down"


class AdminAbortedError(AbortedError):
    """An operator ended it over the control socket."""

    code = "aborted_by_admin"
