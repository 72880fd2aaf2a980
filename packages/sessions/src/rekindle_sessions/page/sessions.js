// The view of sessions: their list, and the one that is open.

import { leaveSession, noticed, openSession } from "./session.js";
import { showSessions } from "./session_list.js";
import { startNew } from "./session_new.js";

/** List the sessions; `id` is the open one's. */
export async function show(id) {
  noticed(await showSessions(id));
}

/** Follow a session; `news` is called when the list has changed. */
export const open = openSession;

/** Stop following. */
export const leave = leaveSession;

startNew();
