// Who stands on whose blocks: a bar for each agent, its beginning in the colour of those that share it.

import { byId, el, keyed } from "./dom.js";
import { count, counted, listed, short } from "./words.js";

const COLOURS = 6;
const MOST_NAMES = 8;

/** Draw the groups of agents that share a beginning; nothing where nobody does. */
export function showSharing(overview) {
  const bars = barsOf(overview.agents);
  const groups = groupsOf(bars);
  byId("no-sharing").hidden = groups.length > 0;
  const most = Math.max(1, ...bars.map((bar) => bar.num_tokens));
  const rows = groups.flatMap((group, index) => group.bars.map((bar) => ({ ...bar, every: group.every, colour: index % COLOURS, most })));
  keyed(byId("sharing"), rows, { key: (row) => row.id, make: makeRow, update: (node, row) => node.show(row) });
  keyed(byId("sharing-groups"), groups.map((group, index) => ({ colour: index % COLOURS, text: told(group) })), {
    key: (row) => row.text,
    make: ({ colour, text }) => el("li", {}, el("span", { class: "swatch", vars: { "--colour": `var(--group-${colour})` } }), el("span", {}, text)),
  });
}

/** For each agent that shares anything, its branch that shares most. */
function barsOf(agents) {
  return agents
    .map((agent) => {
      const branch = agent.branch_infos.reduce((best, each) => (each.shared_tokens > (best?.shared_tokens ?? 0) ? each : best), null);
      return branch && { id: agent.id, num_tokens: branch.num_tokens, shared_tokens: branch.shared_tokens, shared_with: branch.shared_with };
    })
    .filter(Boolean)
    .sort((a, b) => a.id.localeCompare(b.id, "en", { numeric: true }));
}

/** Agents that hang together by what they share; `every` leading tokens are common to all of a group. */
export function groupsOf(bars) {
  const groups = [];
  for (const bar of bars) {
    const names = new Set([bar.id, ...bar.shared_with]);
    const touched = groups.filter((group) => [...names].some((name) => name !== "unnamed" && group.names.has(name)));
    const joined = { names: new Set([...names, ...touched.flatMap((group) => [...group.names])]), bars: [...touched.flatMap((group) => group.bars), bar] };
    for (const group of touched) groups.splice(groups.indexOf(group), 1);
    groups.push(joined);
  }
  return groups.map((group) => ({ ...group, names: [...group.names].sort(), every: Math.min(...group.bars.map((bar) => bar.shared_tokens)) }));
}

function told(group) {
  const some = Math.max(...group.bars.map((bar) => bar.shared_tokens));
  const more = some > group.every ? `, some of them up to ${count(some)}` : "";
  const all = group.names.map((name) => (name === "unnamed" ? "unnamed conversations" : short(name)));
  const names = all.length > MOST_NAMES ? [...all.slice(0, MOST_NAMES), `${all.length - MOST_NAMES} others`] : all;
  return `${listed(names)}: ${counted(group.every, "token")}${more}, kept once`;
}

function makeRow({ id }) {
  const spans = ["own", "some", "every"].map((each) => el("span", { class: each }));
  const track = el("div", { class: "track", role: "img" }, spans);
  const said = el("span", { class: "quiet" });
  const row = el("div", { class: "row" }, el("span", { class: "who-shares", title: id }, short(id)), track, said);
  row.show = (bar) => {
    const part = (tokens) => `${(100 * tokens) / bar.most}%`;
    for (const [name, value] of [["--all", part(bar.num_tokens)], ["--some", part(bar.shared_tokens)], ["--every", part(bar.every)]]) track.style.setProperty(name, value);
    track.style.setProperty("--colour", `var(--group-${bar.colour})`);
    track.setAttribute("aria-label", `${bar.shared_tokens} of ${bar.num_tokens} tokens shared with ${listed(bar.shared_with)}`);
    said.textContent = `${count(bar.shared_tokens)} of ${count(bar.num_tokens)}`;
  };
  return row;
}
