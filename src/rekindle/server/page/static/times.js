// How long the first token took, by outcome: a dot for each request on a logarithmic scale, a line at the median.

import { byId, el, svg } from "./dom.js";
import { MEANS, OUTCOMES, count, duration, median } from "./words.js";

const HEIGHT = 150;
const ROW = 28;
const TOP = 6;
const LEFT = 118;
const RIGHT = 14;
let before = "";

/** Draw the requests of all agents that were told, over what the outcomes mean. */
export function showTimes(overview) {
  if (!byId("means").children.length) byId("means").append(...OUTCOMES.flatMap((outcome) => [el("dt", { class: `outcome ${outcome}` }, outcome), el("dd", {}, MEANS[outcome])]));
  const requests = overview.agents.flatMap((agent) => agent.requests).filter((request) => request.first_token_ms !== null && request.outcome);
  const rows = OUTCOMES.map((outcome) => ({ outcome, times: requests.filter((each) => each.outcome === outcome).map((each) => each.first_token_ms) }));
  const box = byId("times");
  const width = Math.max(260, box.clientWidth);
  const now = JSON.stringify([rows, width]);
  if (now === before) return;
  before = now;
  box.replaceChildren(drawn(rows, width));
}

function drawn(rows, width) {
  const all = rows.flatMap((row) => row.times);
  const low = Math.floor(Math.log10(Math.max(0.1, Math.min(10, ...all))));
  const high = Math.max(low + 2, Math.ceil(Math.log10(Math.max(100, ...all))));
  const at = (ms) => LEFT + ((Math.log10(Math.max(ms, 10 ** low)) - low) / (high - low)) * (width - LEFT - RIGHT);
  const bottom = TOP + ROW * rows.length;
  const ticks = Array.from({ length: high - low + 1 }, (_, index) => 10 ** (low + index)).flatMap((ms) => [
    svg("line", { x1: at(ms), x2: at(ms), y1: TOP, y2: bottom }),
    svg("text", { x: at(ms), y: bottom + 18, "text-anchor": "middle" }, label(ms)),
  ]);
  return svg(
    "svg",
    { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": rows.map(told).join("; ") },
    ticks,
    rows.flatMap((row, index) => drawnRow(row, TOP + ROW * index + ROW / 2, at)),
  );
}

function drawnRow({ outcome, times }, y, at) {
  const middle = median(times);
  return [
    svg("text", { class: `label ${outcome}`, x: 0, y: y + 4 }, outcome),
    svg("text", { x: LEFT - 12, y: y + 4, "text-anchor": "end" }, middle === null ? "–" : duration(middle)),
    ...times.map((ms) => svg("circle", { class: outcome, cx: at(ms), cy: y, r: 3.5 })),
    middle === null ? null : svg("line", { class: outcome, x1: at(middle), x2: at(middle), y1: y - 9, y2: y + 9 }),
  ];
}

function label(ms) {
  return ms >= 1000 ? `${count(ms / 1000)} s` : `${ms} ms`;
}

function told({ outcome, times }) {
  return times.length ? `${outcome}: ${times.length} requests, median ${duration(median(times))}` : `${outcome}: none`;
}
