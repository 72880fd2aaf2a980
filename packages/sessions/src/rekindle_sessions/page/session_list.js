// The list of sessions, and how to begin one.

import { Refused, ask, hasKey, here } from "./api.js";
import { byId, el, keyed, say } from "./dom.js";
import { ago, counted, listed } from "./words.js";

export const ROOT = "/v1/coordination/sessions";
export const TOPOLOGIES = {
  turn_by_turn: "turn by turn",
  round_robin: "round robin",
  broadcast: "all answer at once",
  moderated: "a moderator picks",
  whisper: "whispers",
};

let wasOffered = false;

/** Ask for the sessions, list them and return them; `open` is the id of the one that is shown beside. */
export async function showSessions(open) {
  let sessions;
  try {
    sessions = (await ask("GET", ROOT)).data;
  } catch (error) {
    if (!(error instanceof Refused) || error.status === 401) throw error;
    say(byId("sessions-said"), error.message);
    byId("sessions-said").hidden = false;
    return [];
  }
  byId("sessions-said").hidden = true;
  byId("no-sessions").hidden = sessions.length > 0;
  byId("sessions-view").classList.toggle("is-empty", sessions.length === 0);
  if (!sessions.length) {
    say(byId("session-curl"), curl());
    if (!wasOffered) byId("new-session").open = wasOffered = true; // who closes it has it closed
  }
  const rows = sessions.map((session) => ({ ...session, isOpen: session.id === open, used: ago(session.last_use), last_use: 0 }));
  keyed(byId("sessions"), rows, { key: (row) => row.id, make: makeRow, update: (node, row) => node.show(row) });
  return sessions;
}

/** Bring the row of the open session up to how it stands now; the others wait for the list. */
export function showOpen(session) {
  const row = [...byId("sessions").children].find((node) => node.dataset.key === session.id);
  if (row === undefined) return;
  row.stamp = null; // what the list says next is shown again
  row.show({ ...session, isOpen: true, used: ago(session.last_use) });
}

function curl() {
  const key = hasKey() ? " -H 'Authorization: Bearer KEY'" : "";
  const body = {
    title: "The key",
    setting: "The copper key is in the attic. Mira owns the silver bell.",
    agents: [{ name: "Ada" }, { name: "Bo" }, { name: "Cy" }],
    sampling: { max_tokens: 48 },
  };
  const members = Object.entries(body).map(([name, value]) => `${JSON.stringify(name)}: ${JSON.stringify(value)}`);
  return `curl ${here(ROOT)}${key} \\\n  -d '{${members.join(",\n       ")}}'`;
}

function makeRow({ id }) {
  const title = el("strong");
  const about = el("span", { class: "quiet" });
  const link = el("a", { href: `#sessions/${encodeURIComponent(id)}` }, title, about);
  const row = el("li", {}, link);
  row.show = (session) => {
    say(title, session.title || listed(session.names));
    const speaking = session.running.map((turn) => turn.speaker);
    const state = speaking.length ? `${listed(speaking)} speaking` : session.is_unfinished ? "unfinished" : session.used;
    say(about, [TOPOLOGIES[session.topology], counted(session.names.length, "agent"), counted(session.num_turns, "turn"), state].join(" · "));
    if (session.isOpen) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  };
  return row;
}
