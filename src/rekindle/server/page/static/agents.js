// The table of agents: who remembers how much, where it lies, and what the last request reused.

import { hasKey, here } from "./api.js";
import { chatWith, isChatting } from "./chat.js";
import { deedsFor } from "./deeds.js";
import { byId, el, keyed, say } from "./dom.js";
import { receiptOf } from "./receipts.js";
import { ago, clock, count, counted, duration, listed, share, short } from "./words.js";

const opened = new Set(); // ids whose branches and requests are shown
let shown = null;

/** Draw what the server told. */
export function showAgents(overview) {
  shown = overview;
  const agents = [...overview.agents].sort((a, b) => a.id.localeCompare(b.id, "en", { numeric: true }));
  byId("agents").hidden = agents.length === 0;
  byId("no-agents").hidden = agents.length > 0;
  if (!agents.length) say(byId("first-curl"), firstCurl());
  say(byId("agents-sum"), sum(overview));
  const most = Math.max(1, ...agents.map((agent) => agent.num_tokens));
  const rows = agents.flatMap((agent) => {
    const row = { id: agent.id, kind: "row", most, isOpen: opened.has(agent.id), used: ago(agent.last_use), ...fields(agent) };
    return row.isOpen ? [row, { id: agent.id, kind: "detail", agent: { ...agent, last_use: 0 } }] : [row];
  });
  const table = byId("agent-rows");
  const focused = document.activeElement.closest("#agent-rows > tr");
  const at = [...table.children].indexOf(focused);
  keyed(table, rows, {
    key: (row) => `${row.kind} ${row.id}`,
    make: (row) => (row.kind === "row" ? makeRow(row) : makeDetail(row)),
    update: (node, row) => node.show(row),
  });
  if (focused?.isConnected === false) focusOn(table.children[Math.max(0, at - 1)] ?? table.lastElementChild);
}

/** Go on from a row, as the one that had the focus is gone. */
function focusOn(row) {
  (row?.querySelector("button") ?? byId("main")).focus();
}

function fields(agent) {
  const turns = agent.branch_infos.length ? agent.branch_infos[0].num_turns : undefined;
  const last = agent.requests[0] ?? null;
  return { ...agent, turns, last, requests: null, branch_infos: null, last_miss: null, last_use: null };
}

function sum(overview) {
  if (!overview.agents.length) return "";
  const total = (name) => overview.agents.reduce((all, agent) => all + agent[name], 0);
  const others = overview.num_agents - overview.agents.length;
  const who = others > 0 ? `the ${overview.agents.length} used last of ${count(overview.num_agents)}` : counted(overview.num_agents, "agent");
  return `${who}, ${count(total("hot_tokens"))} tokens hot, ${count(total("warm_tokens"))} warm`;
}

function firstCurl() {
  const key = hasKey() ? " -H 'Authorization: Bearer KEY'" : "";
  return `curl ${here("/v1/chat/completions")}${key} -H 'X-Agent-ID: ada' \\\n  -d '{"messages": [{"role": "user", "content": "The copper key is in the attic."}]}'`;
}

function makeRow({ id }) {
  const name = el("button", { type: "button", class: "plain", title: id, "aria-label": id, on: { click: () => toggle(id) } }, short(id));
  const pinned = el("span", { class: "pinned" });
  const of = ["of-hot", "of-warm", "of-saved"].map((each) => el("span", { class: each }));
  const bar = el("div", { class: "memory", role: "img" }, of);
  const cells = Object.fromEntries(
    ["tokens", "hot", "warm", "saved", "branches", "turns", "used"].map((each) => [
      each,
      el("td", { class: "number", "data-label": each[0].toUpperCase() + each.slice(1) }),
    ]),
  );
  cells.used.classList.add("used");
  const last = el("div", { class: "last" });
  const chat = el("button", { type: "button", class: "chat-with", disabled: isChatting(), "aria-label": `Chat with ${id}`, on: { click: () => chatWith(id) } }, "Chat");
  const row = el(
    "tr",
    { class: "agent" },
    el("td", { class: "first" }, el("div", { class: "name" }, name, pinned)),
    el("td", { class: "whole" }, bar),
    cells.tokens, cells.hot, cells.warm, cells.saved, cells.branches, cells.turns,
    el("td", { class: "two", "data-label": "Last request" }, last),
    cells.used,
    el("td", { class: "chatting" }, chat),
  );
  row.show = (agent) => {
    name.setAttribute("aria-expanded", String(agent.isOpen));
    say(pinned, agent.pinned ? "pinned" : "");
    const part = (tokens) => `${(100 * tokens) / agent.most}%`;
    bar.style.setProperty("--hot-share", part(agent.hot_tokens));
    bar.style.setProperty("--warm-share", part(agent.warm_tokens));
    bar.style.setProperty("--saved-share", part(agent.saved_tokens));
    bar.setAttribute("aria-label", `${agent.hot_tokens} hot, ${agent.warm_tokens} warm, ${agent.saved_tokens} saved of ${agent.num_tokens} tokens`);
    say(cells.tokens, count(agent.num_tokens));
    say(cells.hot, count(agent.hot_tokens));
    say(cells.warm, count(agent.warm_tokens));
    say(cells.saved, agent.saved_tokens === agent.num_tokens ? "all" : count(agent.saved_tokens));
    say(cells.branches, count(agent.branches));
    say(cells.turns, count(agent.turns));
    say(cells.used, agent.used);
    last.replaceChildren(...lastRequest(agent.last));
  };
  return row;
}

function lastRequest(request) {
  if (request === null) return [el("span", { class: "quiet" }, "none since the start")];
  if (request.error) return [el("span", { class: "outcome failed" }, "failed")];
  return [
    el("span", { class: `outcome ${request.outcome}` }, request.outcome),
    el("span", {}, share(request.reused_tokens, request.prompt_tokens)),
    el("span", { class: "quiet" }, duration(request.first_token_ms)),
  ];
}

function toggle(id) {
  if (!opened.delete(id)) opened.add(id);
  showAgents(shown);
}

function makeDetail({ id }) {
  const branches = el("ul", { class: "tree" });
  const requests = el("ul");
  const deeds = deedsFor(id);
  const legend = el("p", { class: "quiet tree-legend" }, "Filled: begun with an older branch. Line below: shared with other agents.");
  const of = (title, ...parts) => el("div", {}, el("h3", {}, title), ...parts);
  const cell = el("td", { colspan: 11 }, el("div", { class: "detail" }, deeds, of("Branches", legend, branches), of("Last requests", requests)));
  const row = el("tr", { class: "opened" }, cell);
  row.show = ({ agent }) => {
    row.setAttribute("aria-label", `Branches and requests of ${id}`);
    deeds.show(agent);
    const most = Math.max(1, ...agent.branch_infos.map((branch) => branch.num_tokens));
    legend.hidden = agent.branch_infos.length < 2;
    branches.replaceChildren(...tree(agent.branch_infos).map((branch) => branchLine(branch, most)));
    requests.replaceChildren(...agent.requests.map(requestLine));
    if (!agent.requests.length) requests.append(el("li", { class: "quiet" }, "none since the server started"));
  };
  return row;
}

/** Branches in the order of a tree, each with its `depth`: after the older one that it began with. */
export function tree(branches, parent = null, depth = 0) {
  const known = new Set(branches.map((branch) => branch.number));
  const here = branches.filter((branch) => (known.has(branch.parent) ? branch.parent : null) === parent);
  return here.sort((a, b) => a.number - b.number).flatMap((branch) => [{ ...branch, depth }, ...tree(branches, branch.number, depth + 1)]);
}

function branchLine(branch, most) {
  const turns = branch.num_turns === undefined ? null : el("span", {}, counted(branch.num_turns, "turn"));
  const begins = branch.parent_tokens ? `begins with ${count(branch.parent_tokens)} of no. ${branch.parent}` : null;
  const shared = branch.shared_tokens ? `${count(branch.shared_tokens)} shared with ${listed(branch.shared_with.map(short))}` : null;
  const part = (tokens) => `${(100 * tokens) / most}%`;
  const vars = { "--all": part(branch.num_tokens), "--parent": part(branch.parent_tokens ?? 0), "--shared": part(branch.shared_tokens) };
  return el(
    "li",
    { vars: { "--depth": branch.depth } },
    el("span", {}, `no. ${branch.number}`),
    el("span", { class: "track", vars, "aria-hidden": "true" }, el("span", { class: "all" }), el("span", { class: "of-parent" }), el("span", { class: "of-others" })),
    el("span", {}, counted(branch.num_tokens, "token")),
    turns,
    el("span", { class: "quiet" }, `${count(branch.hot_tokens)} hot, ${count(branch.warm_tokens)} warm, ${count(branch.saved_tokens)} saved`),
    el("span", { class: "quiet" }, [begins, shared].filter(Boolean).join("; ") || "shared with nobody"),
  );
}

function requestLine(request) {
  if (request.error) {
    return el("li", {}, el("span", {}, clock(request.at)), el("span", { class: "outcome failed" }, "failed"), el("span", {}, request.error.message));
  }
  const whose = { shared: ", of others", parent: ", of its parent" }[request.source] ?? "";
  return el(
    "li",
    {},
    el("span", {}, clock(request.at)),
    el("span", { class: `outcome ${request.outcome}` }, request.outcome),
    el("span", {}, `${count(request.reused_tokens)} of ${count(request.prompt_tokens)} reused${whose}`),
    el("span", { class: "quiet" }, `first token ${duration(request.first_token_ms)}`),
    receiptOf("agents", request),
  );
}
