"""The seam to Ray Serve: its autoscaler asks here, in its controller, ten times a second.

Named as import string in the deployment's autoscaling configuration (cluster/application.py). Serve
calls the instance with its AutoscalingContext and takes (replicas, state). It would also apply
delays and factors of its own: they are set to do nothing, so that there is one policy. This
package goes to Serve by value (cluster/application.py), which need not be able to import it: what
is kept between calls is in the state that Serve hands back.
Source: ray/serve/autoscaling_policy.py, _private/autoscaling_state.py (Ray 2.60).
Must not raise where figures are missing, nor wait but for a small write to the GCS, when a note is
due: the controller waits with it.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from deployments.scaling.notes import Note, publish
from deployments.scaling.policy import Decision, ScalingRules, ScalingState, decide
from deployments.scaling.readings import Point, last_heard, reading_of
from deployments.scaling.signals import Bounds, RoleName

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

log = logging.getLogger("ray.serve")  # the controller's own, so that an operator finds it there

DECIDE_INTERVAL_S = 1.0
NOTE_INTERVAL_S = 5.0
STATE, DECIDED_S, NOTED_S, NOTED = "scaling", "decided_s", "noted_s", "noted"
HEARD = "heard"  # by running worker


class RoleScaling:
    """One role's. Serve makes one instance each time that it takes a configuration."""

    def __init__(
        self,
        *,
        app: str,
        role: RoleName,
        rules: Mapping[str, Any],
        tell: Callable[[Note], None] = publish,
    ) -> None:
        """rules: of ScalingRules, as JSON has them."""
        self._app = app
        self._role: RoleName = role
        bounds = Bounds(**rules["bounds"])
        self._rules = ScalingRules(**{**rules, "bounds": bounds})
        self._tell = tell

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Serve's call. Returns the target, and what to hand back next time."""
        kept = dict(context.policy_state)
        now_s = float(context.current_time or 0.0)
        decided_s = kept.get(DECIDED_S)
        target = int(context.target_num_replicas)
        if decided_s is not None and 0 <= now_s - decided_s < DECIDE_INTERVAL_S:
            return target, kept
        told = _by_worker(context)
        series = {name: told.get(name, {}) for name in map(_name, context.running_replicas)}
        before = kept.get(HEARD, {})
        heard = {name: last_heard(of, before.get(name), now_s) for name, of in series.items()}
        workers = {
            name: reading_of(of, heard[name], now_s, self._rules.silent_s)
            for name, of in series.items()
        }
        state = ScalingState(**kept.get(STATE, {}))
        found = decide(self._rules, self._role, workers, target, now_s, state)
        kept |= {STATE: asdict(found.state), DECIDED_S: now_s, HEARD: heard}
        self._note(found, target, kept, now_s)
        return found.replicas, kept

    def _note(self, found: Decision, target: int, kept: dict[str, Any], now_s: float) -> None:
        """Tell operators: each change at once, the rest every few seconds. Mutates kept."""
        noted_s = kept.get(NOTED_S)
        is_due = noted_s is None or not 0 <= now_s - noted_s < NOTE_INTERVAL_S
        if found.action == "holds" and not is_due:
            return
        changed = kept.get(NOTED)
        if found.action != "holds":
            log.info("%s workers: %d to %d: %s", self._role, target, found.replicas, found.why)
            changed = {
                "action": found.action,
                "before": target,
                "after": found.replicas,
                "why": found.why,
                "at_s": now_s,
            }
        kept |= {NOTED_S: now_s, NOTED: changed}
        rules = self._rules
        self._tell(
            Note(
                app=self._app,
                role=self._role,
                replicas=found.replicas,
                replicas_min=rules.replicas_min,
                replicas_max=rules.replicas_max,
                action=found.action,
                why=found.why,
                at_s=now_s,
                last_change=changed,
            )
        )


def _by_worker(context: AutoscalingContext) -> Mapping[str, Mapping[str, Sequence[Point]]]:
    """raw_metrics, not aggregated_metrics: those take a replica's last word for its word now."""
    series: dict[str, dict[str, Sequence[Point]]] = defaultdict(dict)
    for figure, of_replicas in (context.raw_metrics or {}).items():
        for replica, points in of_replicas.items():
            series[_name(replica)][figure] = points
    return series


def _name(replica: Any) -> str:
    """The part of a replica's id that our workers' names end in."""
    return str(replica.unique_id)
