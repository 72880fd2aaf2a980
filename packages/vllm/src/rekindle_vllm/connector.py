"""The KV connector of vLLM: its hooks, in the words of `Planner` and `Transfers`.

vLLM makes one object for its scheduler and one in each worker. The scheduler's opens the store. Name it in
`--kv-transfer-config` as `RekindleConnector` of `rekindle_vllm.connector`; docs/vllm.md has the rest. Tested with vLLM
0.31 and 0.32, whose interface of connectors is not yet stable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.logger import init_logger

from rekindle.agent_ids import check_new_agent_id
from rekindle.config import DEFAULT_NAMESPACE
from rekindle.errors import BadRequest, ModelRefused
from rekindle.model.checkpoint import Source
from rekindle.model.fingerprint import DigestCache
from rekindle_vllm.config import Geometry, computation, facts, total_heads
from rekindle_vllm.figures import Figures
from rekindle_vllm.metrics import RekindleMetrics, RekindleStats
from rekindle_vllm.names import Scope, adapter_digest, model_fingerprint
from rekindle_vllm.owner import RecordOwner
from rekindle_vllm.planner import Planner
from rekindle_vllm.ports import OwnerServer
from rekindle_vllm.refusals import check_engine
from rekindle_vllm.requests import EngineRequest, Reuse, Scheduled
from rekindle_vllm.settings import BridgeSettings
from rekindle_vllm.shares import HeadShare
from rekindle_vllm.steps import StepPlan, StepReport
from rekindle_vllm.transfers import Transfers
from rekindle_vllm.worker import EngineWorker

logger = init_logger("vllm.rekindle")  # below "vllm" its handlers show it
DIGESTS = "digests.json"  # in the store's directory, as our own engine's


@dataclass
class RekindleMetadata(KVConnectorMetadata):
    """A step's plan, on its way to the workers."""

    plan: StepPlan


@dataclass
class RekindleWorkerMetadata(KVConnectorWorkerMetadata):
    """A worker's report, on its way to the scheduler."""

    report: StepReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """The report of both."""
        return RekindleWorkerMetadata(self.report.merged(other.report))


class RekindleConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps KV, and states of recurrent layers, in a store of ours: durable, checked, found by token ids after any
    restart."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        settings = BridgeSettings.of(self._kv_transfer_config.kv_connector_extra_config)
        check_engine(facts(vllm_config, kv_cache_config, settings))
        geometry = Geometry.of(vllm_config, kv_cache_config, settings)
        self._scheduler = _SchedulerSide(vllm_config, settings, geometry) if role is KVConnectorRole.SCHEDULER else None
        self._worker = EngineWorker(vllm_config, settings, geometry) if role is KVConnectorRole.WORKER else None

    @property
    def requires_kv_delivery(self) -> bool:
        """Records that are not saved are computed again: nothing waits for them."""
        return False

    @property
    def transfers(self) -> Transfers:
        """What a worker has read and saved, and how long its steps took for that."""
        assert self._worker is not None
        return self._worker.transfers

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens after the computed ones that are on disk, and whether the request waits for them.

        Otherwise they are loaded in the step that they are scheduled in.
        """
        assert self._scheduler is not None
        known, planner = self._scheduler.engine_request(request), self._scheduler.planner
        num_tokens = 0 if known is None else planner.match(known, num_computed_tokens)
        return num_tokens, num_tokens > 0 and planner.loads_ahead

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has blocks for tokens that are loaded."""
        assert self._scheduler is not None
        self._scheduler.planner.promise(request.request_id, num_external_tokens, blocks.get_block_ids())

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The plan of this step."""
        assert self._scheduler is not None
        blocks = scheduler_output.kv_connector_block_state
        return RekindleMetadata(self._scheduler.planner.plan(_scheduled(scheduler_output), blocks.resolve_block_ids))

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers report of a step."""
        assert self._scheduler is not None
        found = connector_output.kv_connector_worker_meta
        if isinstance(found, RekindleWorkerMetadata):
            self._scheduler.planner.report(found.report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Save the turn; what was reused goes into the response as `kv_transfer_params.rekindle`."""
        assert self._scheduler is not None
        reuse = self._scheduler.planner.finish(request.request_id)
        if reuse is None:
            return False, None
        self._scheduler.figures.finished(reuse)
        logger.info(
            "%s: reused %d of %d tokens (%d hot, %d from disk)%s",
            request.request_id,
            reuse.reused,
            reuse.prompt_tokens,
            reuse.hot,
            reuse.loaded,
            f", {reuse.failed} could not be read and were computed" if reuse.failed else "",
        )
        return False, {"rekindle": described(reuse)}

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`."""
        return self.request_finished(request, [])

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What was added to our figures; those of a worker are its scheduler's."""
        found = {} if self._scheduler is None else self._scheduler.figures.take()
        return RekindleStats(found) if found else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Figures that came from another process."""
        return RekindleStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> KVConnectorPromMetrics | None:
        """Our metrics among vLLM's."""
        return RekindleMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def reset_cache(self) -> bool | None:
        """Use the store no more until the next start: callers reset caches once weights have changed."""
        if self._scheduler is not None:
            logger.warning(
                "the cache was reset, so weights may have changed: nothing is saved or loaded until a restart"
            )
            self._scheduler.planner.stop()
        return True

    def shutdown(self) -> None:
        """Save what is queued and release the store."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()

    # A worker's side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Learn how each layer's blocks are laid out."""
        assert self._worker is not None
        self._worker.register(kv_caches, self._kv_cache_config.num_blocks)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load the step's records, before the forward pass."""
        assert self._worker is not None
        self._worker.load(self._get_connector_metadata().plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All layers are loaded before the first one runs."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """All layers are saved after the last one ran."""

    def wait_for_save(self) -> None:
        """Hand over the step's records, after the forward pass."""
        assert self._worker is not None
        self._worker.save(self._get_connector_metadata().plan)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose record could not be read; vLLM computes them."""
        assert self._worker is not None
        return self._worker.transfers.take_failed_blocks()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests that waited for records, now that these are read; those that lack some are matched again."""
        assert self._worker is not None
        arrived, failed = self._worker.transfers.take_arrived()
        return KVConnectorTransferResults(finished_recving=arrived, failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What became of the step's loads and saves."""
        assert self._worker is not None
        report = self._worker.transfers.take_report()
        return RekindleWorkerMetadata(report) if report else None


def described(reuse: Reuse) -> dict[str, int]:
    """The counts of a response: `reused_tokens` stays true when a load failed, unlike vLLM's own `cached_tokens`."""
    return {
        "prompt_tokens": reuse.prompt_tokens,
        "reused_tokens": reuse.reused,
        "hot_tokens": reuse.hot,
        "loaded_tokens": reuse.loaded,
        "failed_tokens": reuse.failed,
    }


class _SchedulerSide:
    """The owner of the store, and the planner."""

    def __init__(self, vllm_config: Any, settings: BridgeSettings, geometry: Geometry) -> None:
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        store = settings.store(parallel.data_parallel_rank)
        self._digests = DigestCache(store.directory() / DIGESTS)
        directory = Path(settings.model) if settings.model else Source.find(model.model, model.revision).fetch()
        fingerprint = model_fingerprint(directory, computation(model), geometry.layout, self._digests)
        self.owner = RecordOwner.open(
            geometry.layout, fingerprint, store, model=str(model.model), namespaces=settings.namespaces
        )
        self.planner = Planner(self.owner, geometry.groups)
        self.figures = Figures(self.owner)
        workers, total = parallel.tensor_parallel_size, total_heads(vllm_config)
        shares = [HeadShare.of(total, rank, workers) for rank in range(workers)]
        self._server = OwnerServer(self.owner, shares)  # a single worker may be in another process, too
        self._adapters: dict[str, str | None] = {}
        figures = self.owner.stats()
        logger.info(
            "%s has %d records of %d tokens and %d branches of this model; %s",
            store.directory(),
            figures.num_blocks,
            geometry.layout.block_tokens,
            figures.num_sequences,
            geometry.layout.describe(),
        )

    def close(self) -> None:
        """Save what is queued, and release the store."""
        self._server.close()
        self.owner.close()

    def engine_request(self, request: Any) -> EngineRequest | None:
        """The request as the planner knows it; None if token ids do not determine its KV."""
        if request.prompt_embeds is not None or request.resumable or request.pooling_params is not None:
            return None
        adapter = None
        if request.lora_request is not None:
            adapter = self._adapter(request.lora_request.lora_path)
            if adapter is None:
                return None
        given = request.kv_transfer_params or {}
        return EngineRequest(
            request.request_id,
            request.all_token_ids,
            Scope(str(given.get("namespace", DEFAULT_NAMESPACE)), request.cache_salt, adapter),
            _agent(given.get("agent") or getattr(request, "session_id", None)),
            min((feature.mm_position.offset for feature in request.mm_features), default=None),
        )

    def _adapter(self, path: str) -> str | None:
        if path not in self._adapters:
            try:
                self._adapters[path] = adapter_digest(Path(path), self._digests)
            except ModelRefused as error:
                logger.warning("KV of requests with this adapter is not kept: %s", error)
                self._adapters[path] = None
        return self._adapters[path]


def _agent(given: object) -> str | None:
    """A valid id of an agent; None for an unnamed conversation."""
    if given is None:
        return None
    try:
        return check_new_agent_id(given, where="kv_transfer_params.agent")
    except BadRequest as error:
        logger.warning("%s; its KV is kept as that of an unnamed conversation", error)
        return None


def _scheduled(output: Any) -> list[Scheduled]:
    """The requests of a step."""
    tokens, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
    states = output.kv_connector_block_state.boundary_state_offloads
    step = [
        Scheduled(new.req_id, new.num_computed_tokens, tokens[new.req_id], True, states.get(new.req_id, ()))
        for new in output.scheduled_new_reqs
    ]
    for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        begins = name in cached.resumed_req_ids
        step.append(Scheduled(name, computed, tokens[name], begins, states.get(name, ())))
    return step
