"""Defects in simulated fleets: what replicas find and share, how long requests wait, where they go."""

from __future__ import annotations

from tools.defects.mutant import one

FLEETS = "tests/lab/simulate/test_fleet.py"
COMMAND = "tests/lab/simulate/test_fleet_command.py"

FLEET = (
    one(
        "blocks in the tier before their request has ended",
        "rekindle_lab/simulate/fleet/replica.py",
        "self._objects.read(service.tier_blocks, service.tier_tokens)",
        "self._objects.write(job.request)",
        f"{FLEETS}::test_blocks_are_in_the_tier_when_their_request_has_ended",
    ),
    one(
        "a dead replica that remembers",
        "rekindle_lab/simulate/fleet/replica.py",
        "        self.life += 1\n        self._hot = self._memory()\n",
        "        self.life += 1\n",
        f"{FLEETS}::test_a_death_loses_what_is_hot_and_the_tier_is_read_where_that_is_faster",
    ),
    one(
        "an end that the replica did not live to see",
        "rekindle_lab/simulate/fleet/fleet.py",
        "        if life != replica.life:\n",
        "        if replica.is_idle:\n",
        f"{FLEETS}::test_what_a_dead_replica_had_not_finished_is_sent_again_and_waits_from_its_arrival",
    ),
    one(
        "the tier read however slow it is",
        "rekindle_lab/simulate/fleet/speeds.py",
        "return self.load_s(num_tokens) < self.compute_s(num_tokens)",
        "return num_tokens > 0",
        f"{FLEETS}::test_a_death_loses_what_is_hot_and_the_tier_is_read_where_that_is_faster",
    ),
    one(
        "hot memory for each replica instead of all",
        "rekindle_lab/simulate/fleet/fleet.py",
        "self._plan.hot_blocks // self._plan.num_replicas",
        "self._plan.hot_blocks",
        f"{FLEETS}::test_hot_memory_is_shared_by_all_replicas",
    ),
    one(
        "the longer of two queues",
        "rekindle_lab/simulate/fleet/routes.py",
        "key=lambda replica: replica.num_unfinished)",
        "key=lambda replica: -replica.num_unfinished)",
        f"{FLEETS}::test_of_two_queues_the_shorter_is_taken",
    ),
    one(
        "a prefix that no queue outweighs",
        "rekindle_lab/simulate/fleet/routes.py",
        "replica.queue_s(now) + replica.plan(job.request).seconds",
        "replica.plan(job.request).seconds",
        f"{FLEETS}::test_a_new_session_goes_where_its_prefix_is_unless_the_queue_costs_more",
    ),
    one(
        "a ring that starts anew when a replica dies",
        "rekindle_lab/simulate/fleet/routes.py",
        'start = bisect_right(self._places, self._place(f"session {session}"))',
        'start = bisect_right(self._places, self._place(f"session {session} of {live}"))',
        f"{FLEETS}::test_on_the_ring_only_the_sessions_of_a_dead_replica_move_and_they_return",
    ),
    one(
        "one session of all who share a system prompt",
        "rekindle_lab/simulate/fleet/fleet.py",
        "if block in owners or block in common), None)",
        "if block in owners), None)",
        f"{FLEETS}::test_sessions_of_hashed_blocks_share_blocks_that_few_share",
    ),
    one(
        "waits from when a request is sent again",
        "rekindle_lab/simulate/fleet/fleet.py",
        "        for job in lost:\n            self._route(job, now)\n",
        "        for job in lost:\n            self._route(Job(job.request, job.session, now), now)\n",
        f"{FLEETS}::test_what_a_dead_replica_had_not_finished_is_sent_again_and_waits_from_its_arrival",
    ),
    one(
        "objects written that are there",
        "rekindle_lab/simulate/fleet/objects.py",
        "traffic.blocks_put += num_blocks - num_there",
        "traffic.blocks_put += num_blocks",
        f"{FLEETS}::test_objects_are_counted",
    ),
    one(
        "saturation above the bound",
        "rekindle_lab/simulate/fleet/saturation.py",
        "points[beyond - 1] if beyond else None",
        "points[beyond] if beyond < len(points) else None",
        f"{FLEETS}::test_saturation_is_where_the_queue_grows",
    ),
    one(
        "options of a fleet that a memory ignores",
        "rekindle_lab/cli/simulating.py",
        '    _refuse(given, names, "needs --replicas")\n',
        "",
        f"{COMMAND}::test_what_does_not_fit_is_refused",
    ),
)
