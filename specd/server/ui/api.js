/* Requests to the server that the page came from. The key is kept here, in memory, and nowhere else. */

const base = new URL(".", window.location.href);
let key = "";

export const setKey = (value) => {
  key = value.trim();
};

export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

async function refusal(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    error = {}; // not ours: a proxy's page, perhaps
  }
  return new ApiError(error.message ?? `the server answered ${response.status}`, response.status, error.code);
}

async function open(path, body, signal) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const options = { headers, signal, cache: "no-store", credentials: "omit" };
  if (body !== undefined) {
    options.method = "POST";
    options.body = JSON.stringify(body);
    headers["Content-Type"] = "application/json";
  }
  const response = await fetch(new URL(path, base), options);
  if (!response.ok) throw await refusal(response);
  return response;
}

/** The events of a stream, as objects. Throws ApiError for refusals, error events and streams that are cut off. */
export async function* stream(path, body, signal) {
  const response = await open(path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        if (!block.startsWith("data: ")) continue; // a comment that keeps the connection open
        if (block === "data: [DONE]") return;
        const found = JSON.parse(block.slice(6));
        if (found.error) throw new ApiError(found.error.message, response.status, found.error.code);
        yield found;
      }
    }
  } finally {
    await reader.cancel().catch(() => {}); // it may have failed already, which the loop has told
  }
  if (body !== undefined) throw new ApiError("the stream ended before the answer did", response.status, "cut_off");
}
