// The last miss of each agent: what was computed, why, and what to do, in the words of `rekindle why`.

import { byId, el, keyed } from "./dom.js";
import { ago, count, short } from "./words.js";

/** List the agents that missed, the last first. */
export function showMisses(overview) {
  const found = overview.agents
    .filter((agent) => agent.last_miss !== null)
    .map(({ id, last_miss: miss }) => ({ id, miss, when: ago(miss.at) }))
    .sort((a, b) => b.miss.at - a.miss.at);
  byId("no-misses").hidden = found.length > 0;
  keyed(byId("misses"), found, {
    key: ({ id, miss }) => `${id} ${miss.at}`,
    make: makeMiss,
    update: (node, { when }) => node.show(when),
  });
}

function makeMiss({ id, miss }) {
  const { explanation, advice } = miss;
  const when = el("span", { class: "quiet" });
  const reused = miss.reused_tokens ? `${count(miss.reused_tokens)} of ${count(miss.prompt_tokens)} tokens reused` : `all ${count(miss.prompt_tokens)} tokens computed`;
  const node = el(
    "li",
    {},
    el("div", {}, el("p", { class: "agent", title: id }, short(id)), when),
    el(
      "div",
      { class: "what" },
      el("p", {}, el("span", { class: `outcome ${miss.outcome}` }, miss.outcome), ` ${reused}: ${explanation.detail}`),
      texts(explanation),
      el("p", { class: "quiet" }, "What to do: ", advice),
    ),
  );
  node.show = (words) => when.replaceChildren(words);
  return node;
}

/** What was stored and what was sent, from the first difference on, which is marked. */
function texts({ stored, sent }) {
  if (stored === null || sent === null) return null;
  const [start, storedEnd, sentEnd] = difference(stored, sent);
  return el("dl", { class: "texts" }, el("dt", {}, "stored"), marked(stored, start, storedEnd), el("dt", {}, "sent"), marked(sent, start, sentEnd));
}

function marked(text, start, end) {
  const shown = (part) => part.replaceAll("\n", "⏎");
  return el("dd", {}, shown(text.slice(0, start)), start < end ? el("mark", {}, shown(text.slice(start, end))) : null, shown(text.slice(end)));
}

/** Where two texts begin to differ, and the ends of the first words that do. */
export function difference(one, other) {
  let start = 0;
  while (start < one.length && start < other.length && one[start] === other[start]) start += 1;
  while (start > 0 && /\w/.test(one[start - 1])) start -= 1;
  const end = (text) => start + (/^(\w+|\W)?/.exec(text.slice(start))[0].length);
  return [start, end(one), end(other)];
}
