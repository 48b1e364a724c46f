/* Puts the page together: what is told of the engine, the composer, the key, the theme. */

import { setKey, stream } from "./api.js";
import { ask, forget, limits } from "./chat.js";
import { $, html, number } from "./dom.js";
import { choose, draw, show } from "./panels.js";
import { ORIGINS } from "./tokens.js";

const RETRY_MS = 2000;
const THEMES = ["auto", "light", "dark"];
let running = null; // AbortController of the prompt that is being answered
let unlocked = null; // resolves a promise that waits for a key
let tried = false; // a key that has not been accepted yet

// ---------------------------------------------------------------- events

function state(value) {
  $("state").textContent = value;
  $("state").dataset.state = value;
}

function facts(event) {
  const draft = event.drafter === "none" ? "no drafter" : `drafter ${event.drafter}, at most ${event.max_draft} a step`;
  const parts = [html("b", {}, event.model), draft, `${event.acceptance} acceptance`, `context ${number(event.max_len)} tokens`];
  limits.top_logprobs = Math.min(3, event.max_logprobs);
  $("facts").replaceChildren(...parts.map((part) => html("span", {}, part)));
}

async function listen() {
  for (;;) {
    try {
      for await (const event of stream("ui/events")) {
        tried = false;
        state(event.state);
        facts(event);
        show(event);
      }
      state("disconnected");
    } catch (error) {
      state(error.status === 401 ? "locked" : "disconnected");
      if (error.status === 401) {
        $("unlock").hidden = false;
        await key();
        continue;
      }
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

// ---------------------------------------------------------------- key

function openDialog() {
  $("key-refused").hidden = !tried;
  if (!$("key-dialog").open) $("key-dialog").showModal();
}

/** Waits until somebody gives a key. */
function key() {
  openDialog();
  return new Promise((resolve) => {
    unlocked = resolve;
  });
}

function useKey() {
  setKey($("key").value);
  tried = true;
  $("key").value = "";
  $("key-dialog").close();
  unlocked?.();
  unlocked = null;
}

// ---------------------------------------------------------------- composer

function busy(value) {
  $("send").textContent = value ? "Stop" : "Run";
  $("send").setAttribute("aria-label", value ? "Stop the answers" : "Run the prompt");
}

async function submit() {
  const prompt = $("prompt").value.trim();
  if (running) {
    running.abort();
    return;
  }
  if (!prompt) return;
  running = new AbortController();
  busy(true);
  $("prompt").value = "";
  fit();
  $("fresh").hidden = false;
  try {
    await ask(prompt, running.signal);
  } catch (error) {
    $("prompt").value ||= prompt; // not lost; what went wrong stands in the answer's place
    if (error.status === 401) openDialog();
  } finally {
    running = null;
    busy(false);
    fit();
  }
}

/** The prompt's field is as high as its text. */
function fit() {
  $("prompt").style.height = "auto";
  $("prompt").style.height = `${$("prompt").scrollHeight}px`;
}

function theme() {
  const root = document.documentElement;
  const next = THEMES[(THEMES.indexOf(root.dataset.theme ?? "auto") + 1) % THEMES.length];
  if (next === "auto") delete root.dataset.theme;
  else root.dataset.theme = next;
  $("theme").textContent = `Theme: ${next}`;
}

// ---------------------------------------------------------------- start

for (const [origin, [name, meaning]] of Object.entries(ORIGINS)) {
  $("origins").append(html("li", { title: meaning }, html("i", { class: `o-${origin}` }), name));
}
for (const chip of document.querySelectorAll(".chip")) {
  chip.addEventListener("click", () => {
    $("prompt").value = chip.textContent.replace(/\s+/g, " ").trim();
    submit();
  });
}
for (const tab of document.querySelectorAll(".tabs button")) {
  tab.addEventListener("click", () => {
    for (const other of document.querySelectorAll(".tabs button")) other.setAttribute("aria-pressed", other === tab);
    choose(tab.dataset.period);
  });
}
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
$("prompt").addEventListener("input", fit);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running) submit();
});
$("fresh").addEventListener("click", () => {
  running?.abort();
  forget();
  $("fresh").hidden = true;
  $("prompt").focus();
});
$("theme").addEventListener("click", theme);
$("unlock").addEventListener("click", openDialog);
$("key-use").addEventListener("click", useKey);
$("key-cancel").addEventListener("click", () => $("key-dialog").close());
$("key").addEventListener("keydown", (event) => {
  if (event.key === "Enter") useKey();
});
window.addEventListener("resize", draw);
listen();
