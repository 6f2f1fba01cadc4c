"""What one worker says that it holds, as it travels to whoever asks for the ledger.

Called by engine_loop. Pure. The other end is worker_ledgers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deployments.links import frames

if TYPE_CHECKING:  # the connector's session is in an engine's process only
    from kvcache.connector.session import ConnectorLedger


def ledger_of_worker(
    attempts: list[frames.AttemptHeld], held: ConnectorLedger | None, now_s: float
) -> frames.WorkerLedger:
    """held: the connector's; None without one. now_s: on the clock of its loads."""
    staging = held.staging if held is not None else ()
    return frames.WorkerLedger(
        attempts=attempts,
        loads=[
            frames.LoadHeld(
                job.request_id, job.lease, len(job.block_ids), job.aborted, now_s - since_s
            )
            for job, since_s in (held.loads if held is not None else ())
        ],
        staging=[
            frames.StagingHeld(use.owner, use.state.value, use.slots, use.age_s)
            for pool in staging
            for use in pool.uses
        ],
        staging_slots=sum(pool.slots_total for pool in staging),
    )
