"""Follow-up turns: where a decode instance holds the KV of all but the end of a prompt, that end can be computed there, between
its steps, and the output goes on from its own blocks: no KV moves, and nobody waits for others' prompts.

ElasticMM keeps the text-only turns of a picture chat in their group (arXiv 2507.10069); that they stay at their instance, and
when, is ours. Pure; used by routing_rules.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.shared.messages import InstanceId
from triptych.shared.policies.pace import Pace
from triptych.shared.policies.routing import Choice, PromptWork
from triptych.shared.policies.views import StageView


@dataclass(frozen=True, slots=True)
class Hosts:
    """able: instances that decode and take only follow-ups, by what they have of these. decoding: all that decode, by that."""

    able: Sequence[StageView] = ()
    decoding: Sequence[StageView] = ()


NO_HOSTS = Hosts()


@dataclass(frozen=True, slots=True)
class FollowUps:
    """max_tokens: the most that may be left to compute of a prompt, and that a host computes in one step."""

    max_tokens: int = 0

    def holders(self, prompt: PromptWork) -> list[InstanceId]:
        """Who holds enough of a prompt, which is the larger part at least."""
        enough = max(prompt.num_tokens - self.max_tokens, (prompt.num_tokens + 1) // 2)
        return [holder for holder in prompt.prefixes if prompt.num_usable(holder) >= enough]

    def choose(
        self, hosts: Hosts, prompt: PromptWork, candidates: Sequence[StageView], elsewhere: Choice | None
    ) -> Choice | None:
        """A host, unless it is sooner elsewhere: there the KV has to get to a decode instance before the second token, whose
        engine takes it in meanwhile; here running outputs stand still while the end of the prompt is computed."""
        pace = Pace.of(candidates)
        decoding = {view.instance_id: view for view in hosts.decoding}
        able = [view for view in hosts.able if view.num_free_blocks >= prompt.num_blocks]

        def cost_s(view: StageView) -> float:
            own_s = (prompt.num_tokens - prompt.num_usable(view.instance_id)) / pace.at(view)
            first_token_s = pace.wait_s(view) + own_s
            outputs = decoding.get(view.instance_id)
            if outputs is None or not outputs.num_requests:
                return first_token_s
            step_s = outputs.num_requests / outputs.tokens_per_s if outputs.tokens_per_s else 0.0
            return step_s + first_token_s + max(0.0, own_s - prompt.kv_s)

        best = min(able, key=lambda view: (cost_s(view), view.num_requests, view.instance_id), default=None)
        if best is None:
            return None
        num_cached = prompt.num_usable(best.instance_id)
        reason = f"goes on where its KV is, {prompt.num_tokens - num_cached} tokens to compute, {cost_s(best):.3f} s"
        if elsewhere is not None:
            if cost_s(best) > elsewhere.cost_s:
                return None
            reason += f", elsewhere {elsewhere.cost_s:.3f} s"
        return Choice(best.instance_id, reason, num_cached)


NEVER = FollowUps()
