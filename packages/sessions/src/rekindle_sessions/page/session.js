// One session, live: who speaks, who hears what, what each turn reused; it follows events, so whoever makes them happen.

import { Refused, Unreachable, ask, events } from "./api.js";
import { byId, el, keyed, say } from "./dom.js";
import { render } from "./markdown.js";
import { ROOT, TOPOLOGIES, showOpen } from "./session_list.js";
import { colourOf, factsOf, fillRow } from "./transcript.js";
import { counted, duration, listed, share } from "./words.js";

const AGAIN_MS = 1000;
let live = null; // the session that is shown

/** Show a session and follow it until it is left; `news` asks for fresh figures of the page. */
export function openSession(id, news) {
  if (live?.id === id) return;
  leaveSession();
  live = { id, path: `${ROOT}/${encodeURIComponent(id)}`, refresh: news, detail: null, messages: [], marks: [], facts: {}, speaking: new Map(), acting: 0, wasSeen: false, asking: null, again: false, controller: new AbortController() };
  byId("live").hidden = false;
  byId("sessions-view").classList.add("has-live");
  for (const name of ["transcript", "lanes"]) byId(name).replaceChildren();
  for (const name of ["live-title", "live-sum", "live-next", "live-error"]) say(byId(name), "");
  follow(live);
}

export function leaveSession() {
  live?.controller.abort();
  live = null;
  byId("live").hidden = true;
  byId("sessions-view").classList.remove("has-live");
}

async function follow(session) {
  const { signal } = session.controller;
  const onOpen = () => {
    say(byId("live-error"), "");
    return catchUp(session);
  };
  while (!signal.aborted) {
    try {
      // What happens after the stream has opened comes as an event; what happened before is asked for.
      for await (const event of events("GET", `${session.path}/events`, { signal, onOpen })) take(session, event);
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Refused) {
        if (error.status === 404) {
          say(byId("live-error"), error.message);
          return;
        }
      } else if (!(error instanceof Unreachable)) throw error;
    }
    session.speaking.clear();
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

const isShown = (session) => live === session;

/** Ask what there is to know; while somebody asks already, once more after that. */
function catchUp(session) {
  session.again = true;
  session.asking ??= askAll(session).finally(() => (session.asking = null));
  return session.asking;
}

async function askAll(session) {
  while (session.again) {
    session.again = false;
    try {
      await askOnce(session);
    } catch (error) {
      if (!(error instanceof Refused || error instanceof Unreachable)) throw error;
      if (isShown(session)) say(byId("live-error"), error.message);
    }
  }
}

async function askOnce(session) {
  const before = [...session.speaking.keys()];
  const detail = await ask("GET", session.path);
  const after = session.messages.at(-1)?.number ?? -1;
  const { data } = await ask("GET", `${session.path}/messages?after=${after}`);
  session.detail = detail;
  session.messages.push(...data);
  const running = new Set(detail.running.map((turn) => turn.turn));
  // A turn whose listener left is broken off without a word.
  for (const turn of before) if (!running.has(turn)) session.speaking.delete(turn);
  for (const message of data) {
    session.speaking.delete(message.turn);
    if (message.rekindle) session.facts[message.turn] ??= message; // spoken before anybody looked
  }
  for (const turn of detail.running) begin(session, turn);
  draw(session);
}

/** What the list of sessions says of this one, where its own events did not. */
export function noticed(sessions) {
  const listed = sessions.find((each) => each.id === live?.id);
  if (live && !live.wasSeen) draw(live);
  if (listed && live.detail && (listed.num_turns !== live.detail.num_turns || listed.running.length !== live.speaking.size)) catchUp(live);
}

/** Note that somebody speaks, unless the turn has ended: news come over two connections, in any order. */
function begin(session, turn) {
  const hasEnded = session.facts[turn.turn] !== undefined || session.messages.some((message) => message.turn === turn.turn);
  if (!hasEnded && !session.speaking.has(turn.turn)) session.speaking.set(turn.turn, { ...turn, text: "" });
}

function take(session, { name, data }) {
  const last = session.messages.at(-1)?.number ?? -1;
  if (name === "turn_start") {
    begin(session, data);
    draw(session);
  } else if (name === "token") {
    const turn = session.speaking.get(data.turn);
    if (turn === undefined) return; // what it has said by now comes with its end
    turn.text += data.text;
    drawWords(session, data.turn);
  } else if (name === "turn_complete") {
    session.speaking.delete(data.turn);
    session.facts[data.turn] = data;
    catchUp(session);
  } else if (name === "turn_failed") {
    session.speaking.delete(data.turn);
    session.marks.push({ after: last, text: `${data.speaker} could not speak: ${data.error?.message ?? data.error}` });
    catchUp(session);
  } else if (name === "round_complete") {
    const reused = share(data.reused_tokens, data.prompt_tokens);
    const text = `Round ${data.round}: ${counted(data.num_turns, "turn")}, ${reused} of their prompts reused, gap ${duration(data.gap_ms)}`;
    catchUp(session).then(() => mark(session, text));
  } else if (name === "decision") {
    catchUp(session).then(() => mark(session, `Decided: ${data.outcome ?? "nothing"}`));
  } else if (name === "error") {
    say(byId("live-error"), data.message);
  } else {
    catchUp(session);
  }
}

function mark(session, text) {
  session.marks.push({ after: session.messages.at(-1)?.number ?? -1, text });
  draw(session);
}

function draw(session) {
  if (!isShown(session) || session.detail === null) return;
  const { detail } = session;
  const names = detail.agents.map((agent) => agent.name);
  const speaking = [...session.speaking.values()].map((turn) => turn.speaker);
  showOpen({ ...detail, running: [...session.speaking.values()] });
  say(byId("live-title"), detail.title || listed(names));
  say(byId("live-sum"), about(detail));
  say(byId("live-next"), next(detail, speaking));
  for (const name of ["do-turn", "do-round"]) byId(name).disabled = speaking.length > 0 || session.acting > 0;
  byId("tell-stop").disabled = speaking.length === 0;
  drawWho(detail.agents, speaking);
  drawOptions(names);
  drawTranscript(session, names);
}

function about({ topology, agents, num_turns, num_rounds, layout }) {
  const parts = [TOPOLOGIES[topology], counted(agents.length, "agent"), counted(num_turns, "turn"), counted(num_rounds, "round")];
  parts.push(layout.extends ? "prompts only grow at their end" : `${(100 * layout.lost_share).toFixed(0)} % of a prompt is lost: ${layout.why}`);
  return parts.join(" · ");
}

function next(detail, speaking) {
  if (speaking.length) return `${listed(speaking)} ${speaking.length > 1 ? "speak" : "speaks"}`;
  const unfinished = detail.is_unfinished ? "Broken off: it goes on with the next turn or round. " : "";
  return unfinished + (detail.expected.length ? `Next: ${listed(detail.expected)}` : "");
}

function drawWho(agents, speaking) {
  const rows = agents.map((agent, index) => ({ ...agent, index, speaks: speaking.includes(agent.name) }));
  keyed(byId("lanes"), rows, {
    key: (row) => row.name,
    make: ({ name, index, role }) => {
      const said = el("span", { class: "quiet" });
      const sign = el("span", { class: "sign", "aria-hidden": "true" }, [...name][0]);
      const row = el("li", { title: role || null, vars: { "--colour": colourOf(index) } }, sign, el("span", {}, name), said);
      row.show = ({ num_tokens: tokens, speaks }) => {
        row.classList.toggle("speaks", speaks);
        say(said, tokens === null ? "" : counted(tokens, "token"));
      };
      return row;
    },
    update: (node, row) => node.show(row),
  });
}

function drawOptions(names) {
  const options = [{ value: "", text: "everybody" }, ...names.map((name) => ({ value: name, text: name }))];
  keyed(byId("tell-to"), options, { key: ({ value }) => value, make: ({ value, text }) => el("option", { value }, text) });
}

function drawTranscript(session, names) {
  const box = byId("transcript");
  const atEnd = !session.wasSeen || box.scrollHeight - box.scrollTop - box.clientHeight < 48;
  const rows = [];
  const marks = session.marks.map((each, index) => ({ ...each, kind: "mark", key: `mark ${index}`, names }));
  const marksAfter = (number) => marks.filter((each) => each.after === number);
  rows.push(...marksAfter(-1));
  for (const message of session.messages) {
    rows.push({ kind: "said", key: `said ${message.number}`, names, message, facts: factsOf(session.facts[message.turn]) });
    rows.push(...marksAfter(message.number));
  }
  for (const turn of session.speaking.values()) {
    rows.push({ kind: "live", key: `turn ${turn.turn}`, names, message: { by: turn.speaker, to: turn.to, purpose: turn.purpose, text: "" }, facts: null });
  }
  box.style.setProperty("--lanes", names.length);
  keyed(box, rows, { key: (row) => row.key, make: () => el("div"), update: fillRow });
  for (const turn of session.speaking.keys()) drawWords(session, turn);
  if (atEnd) box.scrollTop = box.scrollHeight;
  session.wasSeen = box.clientHeight > 0; // what is hidden cannot be scrolled
}

function drawWords(session, turn) {
  if (!isShown(session)) return;
  const box = byId("transcript");
  const words = box.querySelector(`[data-key="turn ${turn}"] .words`);
  if (words === null) return;
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 48;
  render(words, session.speaking.get(turn).text);
  if (atEnd) box.scrollTop = box.scrollHeight;
}

/** Have something happen; `takes` says how many runs it is, which go one at a time. */
async function act(path, body, takes = 0) {
  const session = live;
  say(byId("live-error"), "");
  session.acting += takes;
  draw(session);
  try {
    await ask("POST", `${session.path}/${path}`, { body, patience: 0 });
  } catch (error) {
    if (!(error instanceof Refused || error instanceof Unreachable)) throw error;
    if (isShown(session)) say(byId("live-error"), error.message);
    return false;
  } finally {
    session.acting -= takes;
    await catchUp(session);
    session.refresh();
  }
  return true;
}

for (const name of ["turn", "round"]) byId(`do-${name}`).addEventListener("click", () => act(name, {}, 1));
byId("tell-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const [text, to] = [byId("tell-text").value, byId("tell-to").value];
  const stops = event.submitter === byId("tell-stop");
  const body = { text, ...(to ? { to } : {}), ...(stops ? { stop: "turn" } : {}) };
  byId("tell-text").value = "";
  const isTold = await act(stops ? "interrupt" : to ? "whisper" : "messages", body);
  if (!isTold && !byId("tell-text").value) byId("tell-text").value = text;
});
