"""``scripted:FILE``: a model that answers at once from a policy; for tests and first steps.

It has one replica with a window so large that the lane never waits, takes no time, and claims no
capacity: throughput means nothing here.
"""

from stoker.inference.base import DeviceLoad, ModelInfo, ReplicaInfo
from stoker.inference.byte_tokens import prompt_of
from stoker.inference.policy import Policy
from stoker.inference.sampling import lay_out, read_back
from stoker.model.generation import GenerateRequest, Generation, LogprobKind

WINDOW = 1024


class ScriptedModel:
    """Answers from ``policy`` without delay."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._sampled = 0
        self._prefilled = 0

    def info(self) -> ModelInfo:
        """Return what it is."""
        return ModelInfo(
            name=self._policy.name,
            replicas=(ReplicaInfo(replica=0, window=WINDOW),),
            logprob_kind=LogprobKind.SAMPLED,
            simulated=True,
        )

    async def generate(self, replica: int, request: GenerateRequest) -> Generation:
        """Return the policy's answer; never waits, so there is nothing to cancel."""
        answer = self._policy.answer(request)
        sampled = lay_out(request, answer, prompt_of(request))
        self._sampled += len(sampled.tokens)
        self._prefilled += len(sampled.prompt)
        return read_back(request, answer, sampled, replica=replica, policy_version=0)

    def load(self, replica: int) -> DeviceLoad:
        """Return tokens only: no time passes here."""
        assert replica == 0
        return DeviceLoad(tokens_sampled=self._sampled, tokens_prefilled=self._prefilled)

    async def close(self) -> None:
        """Nothing to let go of."""
