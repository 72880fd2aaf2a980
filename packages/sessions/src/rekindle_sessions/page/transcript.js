// How a message of a session, a turn under way and a mark look in its transcript.

import { el } from "./dom.js";
import { markdown } from "./markdown.js";
import { receiptOf } from "./receipts.js";
import { count, duration, listed, share } from "./words.js";

const COLOURS = 6;

export const colourOf = (index) => `var(--group-${index % COLOURS})`;

/** What a turn reused and how long it took, in words; null while that is not known. */
export function factsOf(done) {
  if (!done) return null;
  const { rekindle, gap_ms: gap, first_token_ms: first, taken_in_tokens: taken, cut } = done;
  const parts = [`reused ${share(rekindle.reused_tokens, rekindle.prompt_tokens)} of ${count(rekindle.prompt_tokens)}`];
  if (gap !== null) parts.push(`gap ${duration(gap)}`);
  parts.push(`first token ${duration(first)}`);
  if (taken) parts.push(`${count(taken)} taken in while listening`);
  if (cut) parts.push("interrupted");
  return { outcome: rekindle.outcome, text: parts.join(" · ") };
}

export function fillRow(node, row) {
  node.setAttribute("class", row.kind === "live" ? "is-speaking" : row.kind);
  if (row.kind === "live") node.setAttribute("aria-busy", "true");
  if (row.kind === "mark") {
    node.replaceChildren(lanes(row.names, () => ""), el("p", { class: "utterance" }, el("span", {}, row.text)));
    return;
  }
  const { by, to, purpose, text } = row.message;
  const hears = (name) => (name === by ? "speaks" : to === null || to.includes(name) ? "hears" : "");
  const facts = row.facts && [el("span", { class: `outcome ${row.facts.outcome}` }, row.facts.outcome), ` ${row.facts.text}`];
  node.replaceChildren(
    lanes(row.names, hears),
    el(
      "div",
      { class: "utterance" },
      el("span", { class: "by" }, by),
      el("span", { class: "quiet" }, audience(to, purpose)),
      markdown(text),
      facts || row.kind === "live" ? el("p", { class: "facts" }, facts ?? "") : null,
      receiptOf("session", row.message),
    ),
  );
}

function lanes(names, hears) {
  const signs = names.map((name, index) => el("span", { class: hears(name), title: name, vars: { "--colour": colourOf(index) } }));
  return el("div", { class: "lane-row", "aria-hidden": "true" }, signs);
}

function audience(to, purpose) {
  const what = { ballot: "votes", pick: "picks who is next" }[purpose] ?? "";
  const whom = to === null ? "" : to.length ? `to ${listed(to)} alone` : "heard by nobody else";
  return [what, whom].filter(Boolean).join(", ");
}
