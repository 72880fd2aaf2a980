// A chat with any agent. The conversation lives in this tab; what the agent computed of it lives on the server.

import { Refused, Unreachable, events } from "./api.js";
import { byId, el, keyed, say } from "./dom.js";
import { markdown, render } from "./markdown.js";
import { receiptOf } from "./receipts.js";
import { MEANS, count, duration, share } from "./words.js";

const KEPT = "rekindle-chats";
const PATH = "/v1/chat/completions";
let namespace = null; // whose chats these are
let chats = new Map(); // agent -> messages, with facts
let running = null; // {controller, agent}
let isLeaving = false; // the page is, which breaks off its reply
let refresh = () => {};
let sampling = {}; // what replies are drawn with where the person says nothing

const agentField = () => byId("chat-agent");
const agent = () => agentField().value.trim();
const messages = (of = agent()) => chats.get(of) ?? [];

/** Listen to what the person does; `news` asks for fresh figures. */
export function startChat(news) {
  refresh = news;
  byId("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  const showField = ({ target }) => target.closest("details")?.setAttribute("open", ""); // else nobody sees what is wrong
  byId("chat-form").addEventListener("invalid", showField, true);
  byId("chat-text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      byId("chat-form").requestSubmit();
    }
  });
  byId("chat-stop").addEventListener("click", () => running?.controller.abort());
  byId("chat-new").addEventListener("click", () => {
    chats.delete(agent());
    keep();
    draw();
    byId("chat-text").focus();
  });
  agentField().addEventListener("input", draw);
  addEventListener("pagehide", () => (isLeaving = true));
  addEventListener("pageshow", () => (isLeaving = false));
}

/** Show the chats of a namespace; for another one the page begins anew, so that nothing is left of the first. */
export function chatIn(name) {
  if (namespace === name) return;
  if (namespace !== null) location.reload();
  namespace = name;
  chats = new Map(Object.entries(JSON.parse(sessionStorage.getItem(`${KEPT} ${name}`) ?? "{}")));
  draw();
}

/** Offer the names of agents that there are. */
export function showNames(agents) {
  keyed(byId("agent-names"), agents.map((each) => each.id).sort(), { key: (id) => id, make: (id) => el("option", { value: id }) });
}

/** Draw replies with these values, of which the person may change the temperature. */
export function drawWith(values) {
  sampling = values;
  byId("chat-heat").placeholder = values.temperature ?? 1;
}

export const isChatting = () => running !== null;

/** Turn to an agent. */
export function chatWith(id) {
  agentField().value = id;
  draw();
  byId("chat-text").focus();
}

async function send() {
  const text = byId("chat-text").value;
  if (running || !text.trim() || !agentField().reportValidity()) return;
  const [who, system] = [agent(), byId("chat-system").value.trim()];
  const said = [...messages(who)];
  if (!said.length && system) said.push({ role: "system", content: system });
  said.push({ role: "user", content: text });
  chats.set(who, said);
  keep();
  byId("chat-text").value = "";
  running = { controller: new AbortController(), agent: who };
  lock(true);
  draw();
  const reply = { role: "assistant", content: "", facts: {} };
  const node = makeSaid(reply);
  node.classList.add("is-speaking");
  node.setAttribute("aria-busy", "true"); // read out once it is whole
  byId("chat-log").append(node);
  toEnd();
  try {
    await hear(who, said, reply, node);
    said.push(reply);
  } catch (error) {
    if (!failed(error, said, reply, text)) throw error;
  } finally {
    running = null;
    keep();
    lock(false);
    draw();
    refresh();
  }
}

/** What became of a reply that broke off; false where the fault is this page's own. */
function failed(error, said, reply, text) {
  const isStopped = error.name === "AbortError";
  if (!(isStopped || error instanceof Refused || error instanceof Unreachable)) return false;
  if (isLeaving) return true;
  reply.facts.stopped = isStopped;
  if (reply.content) said.push(reply);
  else unsay(said, text);
  if (!isStopped) said.push({ role: "error", content: error.message });
  return true;
}

/** Take back words that were not answered, so that they can be sent again. */
function unsay(said, text) {
  said.pop();
  if (said.length === 1 && said[0].role === "system") said.pop();
  if (!byId("chat-text").value) byId("chat-text").value = text;
}

async function hear(who, said, reply, node) {
  const body = {
    messages: said.filter((each) => each.role !== "error").map(({ facts, ...message }) => message),
    stream: true,
    max_tokens: byId("chat-most").valueAsNumber || 256,
    ...sampling,
  };
  if (byId("chat-heat").value) body.temperature = byId("chat-heat").valueAsNumber;
  const began = performance.now();
  let first = null;
  const options = { body, headers: { "X-Agent-ID": encodeURIComponent(who) }, signal: running.controller.signal };
  for await (const { data } of events("POST", PATH, options)) {
    if (data.error) throw new Refused(data.error.status ?? 500, data.error.message);
    const choice = data.choices[0];
    const delta = choice?.delta ?? {};
    if (delta.content || delta.reasoning_content) first ??= performance.now() - began;
    reply.content += delta.content ?? "";
    if (delta.reasoning_content) reply.reasoning_content = (reply.reasoning_content ?? "") + delta.reasoning_content;
    if (data.rekindle) reply.facts = { ...factsOf(data.rekindle, choice.finish_reason, first), receipt: data.id };
    const log = byId("chat-log");
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 48; // else somebody reads further up
    node.show(reply);
    if (isAtEnd) toEnd();
  }
}

function factsOf(report, reason, seenMs) {
  const { outcome, source, prompt_tokens, reused_tokens, warm_tokens, completion_tokens, timings } = report;
  return { outcome, source, prompt_tokens, reused_tokens, warm_tokens, completion_tokens, reason, firstMs: timings.first_token_ms ?? seenMs };
}

function draw() {
  const log = byId("chat-log");
  if (running && running.agent === agent() && log.querySelector(".is-speaking")) return;
  const said = messages();
  log.replaceChildren(...said.map(makeSaid));
  if (!said.length) {
    const words = "What you write goes to the agent named above, which has a memory of its own. Beneath each answer stands what was reused for it.";
    log.append(el("p", { class: "quiet blank" }, words));
  }
  toEnd();
}

function toEnd() {
  const log = byId("chat-log");
  log.scrollTop = log.scrollHeight;
}

function lock(isRunning) {
  byId("chat-send").hidden = isRunning;
  byId("chat-stop").hidden = !isRunning;
  for (const node of [agentField(), byId("chat-new"), ...document.querySelectorAll(".chat-with")]) node.disabled = isRunning;
  // The button that had the focus is gone: Stop takes its place, and then the text again.
  if (isRunning && document.activeElement === document.body) byId("chat-stop").focus();
  if (!isRunning && document.activeElement === document.body) byId("chat-text").focus();
}

function keep() {
  try {
    sessionStorage.setItem(`${KEPT} ${namespace}`, JSON.stringify(Object.fromEntries(chats)));
  } catch {
    sessionStorage.removeItem(`${KEPT} ${namespace}`); // there is no room: they live as long as the page does
  }
}

function makeSaid(message) {
  const whose = { user: "You", assistant: agent(), system: "System prompt", error: "Failed" }[message.role];
  if (message.role !== "assistant") {
    return el("div", { class: `said ${message.role}` }, el("span", { class: "hidden" }, `${whose}: `), message.content);
  }
  const thought = el("p", { class: "thought" });
  const words = markdown("");
  const facts = el("div", { class: "facts" });
  const node = el("div", { class: "said assistant" }, el("span", { class: "hidden" }, `${whose}: `), thought, words, facts);
  node.show = (reply) => {
    say(thought, reply.reasoning_content ?? "");
    thought.hidden = !reply.reasoning_content;
    render(words, reply.content);
    facts.replaceChildren(...told(reply.facts));
  };
  node.show(message);
  return node;
}

function told(facts) {
  if (!facts?.outcome) return [facts?.stopped ? "stopped" : ""];
  const reused = `reused ${count(facts.reused_tokens)} of ${count(facts.prompt_tokens)} (${share(facts.reused_tokens, facts.prompt_tokens)})`;
  const parts = [reused];
  if (facts.warm_tokens) parts.push(`${count(facts.warm_tokens)} from disk`);
  if (facts.source === "shared") parts.push("of other agents");
  parts.push(`first token ${duration(facts.firstMs)}`);
  if (facts.reason === "length") parts.push("cut at the limit");
  const outcome = el("span", { class: `outcome ${facts.outcome}`, title: MEANS[facts.outcome] }, facts.outcome);
  return [outcome, ` ${parts.join(" · ")}`, receiptOf("chat", facts)].filter(Boolean);
}
