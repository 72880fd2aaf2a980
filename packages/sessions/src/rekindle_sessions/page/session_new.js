// Beginning a session: who takes part, what they know, who speaks when.

import { Refused, Unreachable, ask } from "./api.js";
import { byId, el, say } from "./dom.js";
import { ROOT, TOPOLOGIES } from "./session_list.js";

/** Fill the form, and open the session that it begins. */
export function startNew() {
  byId("new-topology").replaceChildren(...Object.entries(TOPOLOGIES).map(([value, words]) => el("option", { value }, words)));
  byId("new-topology").value = "round_robin";
  byId("new-session-form").addEventListener("submit", (event) => {
    event.preventDefault();
    begin();
  });
}

async function begin() {
  say(byId("new-error"), "");
  try {
    const { id } = await ask("POST", ROOT, { body: asked() });
    byId("new-session").open = false;
    for (const name of ["new-setting", "new-opening", "new-title"]) byId(name).value = "";
    location.hash = `#sessions/${encodeURIComponent(id)}`;
  } catch (error) {
    if (!(error instanceof Refused || error instanceof Unreachable)) throw error;
    say(byId("new-error"), error.message);
  }
}

function asked() {
  const names = byId("new-agents").value.split(",").map((name) => name.trim()).filter(Boolean);
  const topology = byId("new-topology").value;
  return {
    agents: names.map((name) => ({ name })),
    topology,
    ...(topology === "moderated" ? { moderator: names[0] } : {}),
    title: byId("new-title").value.trim(),
    setting: byId("new-setting").value.trim(),
    opening: byId("new-opening").value.trim(),
    sampling: { max_tokens: byId("new-most").valueAsNumber },
  };
}
