"""The planted bugs, by the part of production that they are planted in; see mutants.py.

Small things that a hurried change might do. Some are caught by a core's own validate(), most by
what the world can see.
"""

from __future__ import annotations

from tests.simulation.mutants import Mutant

MUTANTS = (
    # Slot table, rows, leases, arena, journal
    Mutant(
        "a publish of an older grant is accepted",
        "kvcache.slot_rows:SlotRows.may_write",
        "row.generation == generation and ",
        "",
    ),
    Mutant(
        "an overdue fill is given away at once",
        "kvcache.slot_table:SlotTable.expire",
        "self._rows.quarantine(slot)",
        "self._rows.free(slot)",
    ),
    Mutant(
        "leased blocks are evicted",
        "kvcache.slot_rows:SlotRows._may_evict",
        " and not self._leases.is_pinned(slot)",
        "",
    ),
    Mutant(
        "a dead writer's slots are never free",
        "kvcache.slot_table:SlotTable.owner_lost",
        "self._rows.free(slot)",
        "pass",
    ),
    Mutant(
        "leases outlive their deadline",
        "kvcache.slot_table:SlotTable.expire",
        "self._leases.overdue(now_s)",
        "()",
    ),
    Mutant(
        "the last block of a prefix is not pinned",
        "kvcache.slot_table:SlotTable.lease_prefix",
        "for slot in slots:\n",
        "for slot in slots[:-1] or slots:\n",
    ),
    Mutant(
        "a look-up does not end the hand-off",
        "kvcache.slot_table:SlotTable.lease_prefix",
        "if takes_over is not None and self._end((HANDOFF_SCOPE, takes_over)):",
        "if takes_over is not None and False:",
    ),
    Mutant(
        "a lost connection keeps its leases",
        "kvcache.slot_table:SlotTable.owner_lost",
        "self._end(key)",
        "pass",
    ),
    Mutant(
        "a dead worker's hand-offs live as long as a live one's",
        "kvcache.leases:LeaseBook.orphan_handoffs",
        "min(lease.deadline_s, now_s + orphan_ttl_s)",
        "lease.deadline_s",
    ),
    Mutant(
        "a block published under a hand-off does not join it",
        "kvcache.slot_table:SlotTable._publish_one",
        "self._leases.published(block.hash, slot)",
        "self._leases._awaiting.pop(block.hash, None)",
    ),
    Mutant(
        "a corrupt block stays in use",
        "kvcache.arena:Arena._examine",
        "self.table.retire(slot, generation)",
        "pass",
    ),
    Mutant(
        "evictions are not told",
        "kvcache.slot_rows:SlotRows._forget",
        "self.events.append(BlockRemoved(row.hash))",
        "pass",
    ),
    Mutant(
        "a snapshot claims one batch more than it has",
        "kvcache.journal:Journal.snapshot",
        "self._sequence,",
        "self._sequence + 1,",
    ),
    Mutant(
        "a condemned worker's slots are free at once",
        "kvcache.agent:AgentServer._condemn",
        "writer_gone=False",
        "writer_gone=True",
    ),
    # Readers
    Mutant(
        "bytes are not compared with their checksum",
        "kvcache.slab:SlabView.read_into",
        "if actual != ref.checksum:",
        "if False:",
    ),
    Mutant(
        "a reader does not look at the header",
        "kvcache.slab:SlabView.holds",
        "return (",
        "return True or (",
    ),
    # Directory, its shipping, and the router's replica
    Mutant(
        "a gap in the batches is ignored",
        "kvcache.directory:DirectoryCore.apply",
        " and batch.sequence == stream.sequence + 1:\n        return (*self._take",
        ":\n        return (*self._take",
    ),
    Mutant(
        "an old batch is applied again",
        "kvcache.directory:DirectoryCore.apply",
        "self.counters.batches_duplicate_total += 1\n        return ()",
        "return tuple(self._take(stream, batch))",
    ),
    Mutant(
        "another incarnation is taken for the same",
        "kvcache.directory:DirectoryCore.apply_snapshot",
        "if snapshot.incarnation == stream.incarnation:",
        "if True:",
    ),
    Mutant(
        "a snapshot adds to what was there",
        "kvcache.directory_stream:Stream.replace",
        "self.hashes, dict.fromkeys(snapshot.hashes)",
        "self.hashes, {**self.hashes, **dict.fromkeys(snapshot.hashes)}",
    ),
    Mutant(
        "a replica skips an update",
        "kvcache.directory_log:UpdateLog.since",
        "islice(self._updates, start, start + updates_max)",
        "islice(self._updates, start + (len(self._updates) > start + 1), start + updates_max)",
    ),
    Mutant(
        "removed blocks stay in the index",
        "router.prefix_index:PrefixIndex._index",
        "masks.pop(name, None)",
        "pass",
    ),
    Mutant(
        "a worker that is gone stays in the index",
        "router.route:Router.remove_worker",
        "self.index.drop_source(known.engine_source)",
        "pass",
    ),
    Mutant(
        "blocks of a degraded source count",
        "router.prefix_index:PrefixIndex._refresh",
        "freshness is Freshness.EXACT",
        "True",
    ),
    # Digests
    Mutant(
        "an eviction is left out of the slab's digest",
        "kvcache.slot_rows:SlotRows._forget",
        "self.digest ^= bits_of(row.hash)",
        "pass",
    ),
    Mutant(
        "a digest that differs is ignored",
        "kvcache.directory:DirectoryCore._audit",
        'return self._degrade(stream, "digest", needs_snapshot=True)',
        "return ()",
    ),
    Mutant(
        "a digest is compared wherever the stream is",
        "kvcache.directory_stream:Stream.due_audit",
        "is_here = told.sequence == self.sequence and ",
        "is_here = ",
    ),
    Mutant(
        "a lost last batch is not noticed by the digests",
        "kvcache.directory:DirectoryCore.apply_digest",
        "return () if last is None else",
        "return () if True else",
    ),
    Mutant(
        "replicas are not given the digests",
        "kvcache.directory:DirectoryCore._audit",
        "self._log.append(told)",
        "pass",
    ),
    Mutant(
        "a replica does not ask for what it knows wrongly",
        "router.prefix_index:PrefixIndex._want",
        "self.wanted[effect.source, effect.model] = None",
        "pass",
    ),
    Mutant(
        "the directory does not tell a stream again",
        "kvcache.directory:DirectoryCore.tell_again",
        "self._log.append(update)",
        "pass",
    ),
    Mutant(
        "an agent sends no digest after its first",
        "deployments.node.event_shipping:EventShipping.shipment",
        "is_due = self._audited_s is None or now_s - self._audited_s >= self._audit_interval_s",
        "is_due = self._audited_s is None",
    ),
    # Router's load and admission
    Mutant(
        "an ended attempt keeps its tokens in the books",
        "router.load:LoadBook.ended",
        "books.tokens -= flight.tokens",
        "pass",
    ),
    Mutant(
        "a planned decode worker stays booked",
        "router.load:LoadBook.ended",
        "for place in places:",
        "for place in places[:1]:",
    ),
    Mutant(
        "admission forgets to release",
        "router.admission:Admission.release",
        "del known.entries[request_id]",
        "pass",
    ),
    Mutant(
        "an agent that is back is not noticed",
        "deployments.ingress.worker_views:WorkerViews._judge_handoff",
        "usable=not any(linked.agent_problem for linked in here)",
        "usable=False",
    ),
    Mutant(
        "a lost worker's missing agent is remembered",
        "deployments.ingress.worker_views:WorkerViews.left",
        "if linked.agent_problem:",
        "if False:",
    ),
    Mutant(
        "a worker that Serve takes away gets new work",
        "deployments.ingress.worker_views:WorkerViews.leaves",
        "linked.is_draining = draining",
        "pass",
    ),
    Mutant(
        "a silent worker gets new work",
        "deployments.ingress.worker_views:WorkerViews.listened",
        "self._tell(linked)",
        "pass",
    ),
    Mutant(
        "a worker that is heard again gets no work",
        "deployments.ingress.worker_views:WorkerViews.heard",
        "linked.is_silent, False, 0.0",
        "linked.is_silent, linked.is_silent, 0.0",
    ),
    # Request flow
    Mutant(
        "late outputs are accepted",
        "deployments.flow.request_flow:RequestFlow.outputs",
        "self._by_attempt.get(output.request_id)",
        "self._requests.get(output.request_id.split('~')[0])",
    ),
    Mutant(
        "a hand-over forgets the first token",
        "deployments.flow.request_flow:RequestFlow._attempt",
        "resume_tokens=tuple(request.tokens)",
        "resume_tokens=tuple(request.tokens) if why != 'hand-over' else ()",
    ),
    Mutant(
        "a resume forgets the last token",
        "deployments.flow.request_flow:RequestFlow._attempt",
        "resume_tokens=tuple(request.tokens)",
        "resume_tokens=tuple(request.tokens[:-1] if 'lost' in why else request.tokens)",
    ),
    Mutant(
        "prefill's own finish goes to the client",
        "deployments.flow.request_flow:RequestFlow._attempt_done",
        "and tokens_left(request.intake, request.tokens) > 0",
        "and False",
    ),
    Mutant(
        "an abort does not reach the worker",
        "deployments.flow.request_flow:RequestFlow.abort",
        "effects.append(AbortAttempt(attempt.worker, attempt.attempt))",
        "pass",
    ),
    Mutant(
        "a hand-off that nobody wants is left to its deadline",
        "deployments.flow.request_flow:RequestFlow._end_handoff",
        "return [EndHandoff(*handoff), *effects]",
        "return effects",
    ),
    Mutant(
        "a lost worker's requests are forgotten",
        "deployments.flow.request_flow:RequestFlow.worker_lost",
        'effects += self._start(request, f"{worker} lost", now_s)',
        "pass",
    ),
    Mutant(
        "deaths are not counted",
        "deployments.flow.request_flow:RequestFlow.worker_lost",
        "request.worker_deaths + is_death",
        "request.worker_deaths",
    ),
    Mutant(
        "a stalled ingress calls silent workers dead",
        "deployments.ingress.worker_news:WorkerNews.lost",
        "now_s - self._ticked_s < STALL_TICKS * TICK_S",
        "True",
    ),
    Mutant(
        "a refused request goes nowhere",
        "deployments.flow.request_flow:RequestFlow.rejected",
        'return self._start(request, f"{worker} refused", now_s)',
        "return []",
    ),
    Mutant(
        "a parked request waits for ever",
        "deployments.flow.request_flow:RequestFlow.tick",
        "if now_s >= request.parked_until_s:",
        "if False:",
    ),
    # Engine loop and connector
    Mutant(
        "a lost ingress's attempts go on",
        "deployments.workers.engine_loop:EngineLoop._abort_all",
        "self._abort(owner, [a for a, known in self._attempts.items() if known.owner == owner])",
        "pass",
    ),
    Mutant(
        "a finished request keeps its look-up's lease",
        "kvcache.connector.scheduler_side:SchedulerSide.finish",
        "self._drop_lookup(state)",
        "pass",
    ),
    Mutant(
        "loads ignore what the engine has already",
        "kvcache.connector.scheduler_side:SchedulerSide.allocated",
        "lookup.refs[first:last]",
        "lookup.refs[: last - first]",
    ),
    Mutant(
        "a block is offered before it is full",
        "kvcache.connector.scheduler_side:SchedulerSide.scheduled",
        "(computed_tokens + new_tokens) // self._block_size",
        "-(-(computed_tokens + new_tokens) // self._block_size)",
    ),
    Mutant(
        "a failed load is taken for a good one",
        "kvcache.connector.loader:BlockLoader._end",
        "failed = tuple(job.block_ids[loaded:])",
        "failed = ()",
    ),
    Mutant(
        "a loaded block's lease is not released",
        "kvcache.connector.loader:BlockLoader._end",
        "store.release(job.lease)",
        "pass",
    ),
    Mutant(
        "grants that come too late are kept",
        "kvcache.store:BlockStore._abandon_outcomes",
        "self.abandon([grant for grant in outcomes if isinstance(grant, Grant)])",
        "pass",
    ),
)
