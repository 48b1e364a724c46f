/* The live figures: what /ui/events tells once a second, drawn. */

import { $, canvas, html, number, percent, svg } from "./dom.js";

const MINUTE = 60; // events
const STEPS = 8; // of the timeline
const STAGES = ["schedule", "draft", "verify", "accept", "refill"];
const PAGES = { u: "used", s: "shared", c: "cached", ".": "free" };
const past = []; // the last events, oldest first
let spans = []; // the stages of the last steps
let period = "minute";

export function show(event) {
  if (past.length && event.uptime_s < past.at(-1).uptime_s) past.length = 0; // another process answers now
  past.push(event);
  if (past.length > MINUTE + 1) past.shift();
  remember(event.stages);
  draw();
}

export function draw() {
  if (!past.length) return;
  speed();
  acceptance();
  timeline();
  pages();
}

export function choose(value) {
  period = value;
  draw();
}

const total = (counts) => Object.values(counts).reduce((sum, count) => sum + count, 0);

const since = (before, now) => (name) => now[name] - (before?.[name] ?? 0);

// ---------------------------------------------------------------- speed

function speed() {
  const rates = past.slice(1).map((event, i) => {
    const seconds = Math.max(event.uptime_s - past[i].uptime_s, 0.001);
    return (event.generation_tokens - past[i].generation_tokens) / seconds;
  });
  const now = past.at(-1);
  $("rate").textContent = number(rates.at(-1) ?? 0, (rates.at(-1) ?? 0) < 100 ? 1 : 0);
  const height = 44;
  const width = canvas($("speed"), height);
  const top = Math.max(...rates, 1);
  const points = rates.map((rate, i) => [
    width - ((rates.length - 1 - i) * width) / (MINUTE - 1),
    height - 2 - (rate / top) * (height - 6),
  ]);
  const line = points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");
  const shapes = [svg("path", { class: "grid", d: `M0 ${height - 0.5}H${width}` })];
  if (points.length > 1) {
    shapes.push(svg("path", { class: "spark-area", d: `M${points[0][0]} ${height}L${line}V${height}Z` }));
    shapes.push(svg("path", { class: "spark", d: `M${line}` }));
  }
  canvas($("speed"), height, shapes);
  const drafts = total(now.drafts) - total(past[0].drafts);
  const kept = total(now.accepted_tokens) - total(past[0].accepted_tokens);
  const facts = {
    running: number(now.running),
    waiting: number(now.waiting),
    "tokens a step": drafts ? number(1 + kept / drafts, 2) : "–",
    "since start": number(now.generation_tokens),
  };
  $("speed-facts").replaceChildren(
    ...Object.entries(facts).flatMap(([name, value]) => [html("dt", {}, name), html("dd", {}, value)]),
  );
}

// ---------------------------------------------------------------- acceptance

function acceptance() {
  const now = past.at(-1);
  const before = period === "minute" ? past[0] : null;
  const count = (name, i) => since(before?.[name], now[name])(i);
  const rows = Array.from({ length: now.max_draft }, (_, i) => ({
    drafted: count("drafted_per_position", i),
    kept: count("accepted_per_position", i),
  }));
  const steps = rows[0]?.drafted ?? 0;
  const height = 128;
  const [left, bottom, top] = [30, 16, 6];
  const width = canvas($("acceptance"), height);
  const slot = (width - left) / Math.max(rows.length, 1);
  const y = (share) => top + (1 - share) * (height - top - bottom);
  const shapes = [0, 0.5, 1].flatMap((share) => [
    svg("path", { class: "grid", d: `M${left} ${y(share)}H${width}` }),
    svg("text", { x: left - 6, y: y(share) + 3.5, "text-anchor": "end" }, percent(share)),
  ]);
  const line = [];
  const said = [];
  rows.forEach(({ drafted, kept }, i) => {
    const middle = left + (i + 0.5) * slot;
    const wide = Math.min(slot * 0.62, 34);
    const share = drafted ? kept / drafted : 0;
    const title = svg("title", {}, `position ${i + 1}: ${number(kept)} of ${number(drafted)} drafts kept`);
    const box = { x: middle - wide / 2, width: wide, rx: 3 };
    if (drafted) shapes.push(svg("rect", { class: "bar", ...box, y: y(share), height: Math.max(y(0) - y(share), 1) }, title));
    else shapes.push(svg("rect", { class: "bar none", ...box, y: y(0.04), height: y(0) - y(0.04) }, title));
    shapes.push(svg("text", { x: middle, y: height - 3, "text-anchor": "middle" }, i + 1));
    if (drafted) said.push(`position ${i + 1} ${percent(share)}`);
    if (steps && drafted) line.push([middle, y(kept / steps)]);
  });
  if (line.length > 1) shapes.push(svg("path", { class: "survival", d: `M${line.map((p) => p.join(" ")).join("L")}` }));
  shapes.push(...line.map(([cx, cy]) => svg("circle", { class: "survival", cx, cy, r: 3 })));
  if (!steps) {
    const middle = { x: (width + left) / 2, y: y(0.5) - 8, "text-anchor": "middle" };
    shapes.push(svg("text", { ...middle, class: "value" }, now.drafter === "none" ? "no drafter" : "no drafts in this time"));
  }
  canvas($("acceptance"), height, shapes);
  $("acceptance").setAttribute("aria-label", said.length ? `Drafts kept: ${said.join(", ")}` : "No drafts in this time");
}

// ---------------------------------------------------------------- timeline

function remember(found) {
  if (!found.length) return;
  const seen = new Set(found.map(([name, step]) => `${name} ${step}`));
  const all = [...spans.filter(([name, step]) => !seen.has(`${name} ${step}`)), ...found];
  const latest = Math.max(...all.map(([, step]) => step));
  spans = all.filter(([, step]) => step > latest - STEPS);
}

function timeline() {
  const [row, left, right, foot] = [20, 62, 56, 16];
  const height = STAGES.length * row + foot;
  const width = canvas($("timeline"), height);
  const begin = Math.min(...spans.map(([, , start]) => start));
  const end = Math.max(...spans.map(([, , start, duration]) => start + duration));
  const x = (time) => left + ((time - begin) / Math.max(end - begin, 0.001)) * (width - left - right);
  const shapes = [];
  const said = [];
  STAGES.forEach((name, i) => {
    const own = spans.filter(([stage]) => stage === name);
    const mean = own.reduce((sum, [, , , duration]) => sum + duration, 0) / own.length;
    const middle = i * row + row / 2;
    shapes.push(svg("text", { x: 0, y: middle + 3.5 }, name));
    shapes.push(svg("rect", { class: "lane", x: left, y: middle - 6, width: width - left - right, height: 12, rx: 3 }));
    for (const [, step, start, duration] of own) {
      const title = svg("title", {}, `${name}, step ${step}: ${number(duration, 2)} ms`);
      const box = { x: x(start), y: middle - 6, width: Math.max(x(start + duration) - x(start), 1), height: 12, rx: 1.5 };
      shapes.push(svg("rect", { class: `s-${name}`, ...box }, title));
    }
    const told = own.length ? `${number(mean, mean < 10 ? 2 : 1)} ms` : "–";
    shapes.push(svg("text", { class: "value", x: width, y: middle + 3.5, "text-anchor": "end" }, told));
    said.push(`${name} ${told}`);
  });
  const foot_y = height - 3;
  if (spans.length) {
    const steps = new Set(spans.map(([, step]) => step)).size;
    shapes.push(svg("text", { x: left, y: foot_y }, `${steps} steps in ${number(end - begin, 1)} ms`));
    shapes.push(svg("text", { x: width, y: foot_y, "text-anchor": "end" }, "mean"));
  } else shapes.push(svg("text", { x: left, y: foot_y }, "no step yet"));
  canvas($("timeline"), height, shapes);
  $("timeline").setAttribute("aria-label", `Mean duration of the last steps' stages: ${said.join(", ")}`);
}

// ---------------------------------------------------------------- pages

function pages() {
  const { cells, cell_pages, total: all, free, cached, size } = past.at(-1).pages;
  const width = canvas($("pages"), 10);
  const columns = Math.max(16, Math.floor(width / (cells.length > 256 ? 8.5 : 11)));
  const pitch = width / columns;
  const side = pitch - 1.5;
  const paths = { u: "", s: "", c: "", ".": "" };
  [...cells].forEach((cell, i) => {
    const [left, top] = [(i % columns) * pitch, Math.floor(i / columns) * pitch];
    paths[cell] += `M${left.toFixed(1)} ${top.toFixed(1)}h${side.toFixed(1)}v${side.toFixed(1)}h-${side.toFixed(1)}z`;
  });
  const height = Math.ceil(cells.length / columns) * pitch;
  canvas($("pages"), height, Object.entries(paths).map(([cell, d]) => svg("path", { class: `c-${PAGES[cell]}`, d })));
  const used = all - free - cached;
  $("pages").setAttribute("aria-label", `${used} of ${all} pages used, ${cached} cached, ${free} free`);
  const counts = { used, cached, free };
  $("pages-legend").replaceChildren(
    ...Object.entries(counts).map(([name, count]) =>
      html("li", {}, html("i", { class: `k-${name}` }), `${name} `, html("b", {}, number(count)))),
    ...(cells.includes("s") ? [html("li", {}, html("i", { class: "k-shared" }), "shared")] : []),
    html("li", {}, `a square: ${cell_pages === 1 ? "a page" : `${cell_pages} pages`} of ${size} tokens`),
  );
}
