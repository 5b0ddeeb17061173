"""Which experts stay in memory: policies as data, for the daemon to follow and `emberc simulate` to
replay traces against.

All build on least recently used; what they add, they take from an activation map or a predictor.
The daemon follows those that it has the means for. A target's description names the policy of the
artifacts that are built for it; the daemon's setting `expert_policy` names another.
"""

from __future__ import annotations

from dataclasses import dataclass

from emberd.daemon.errors import EmberdError


@dataclass(frozen=True)
class Policy:
    """What a policy adds to evicting the expert that was used least recently.

    pinned: share of the slots that hold the map's most chosen experts for the whole command.
    warmed: the map's most chosen experts are read before they are asked for: as many as fit, when
        the memory is empty, and those of its class when a command's class is told.
    by_class: pins and warming follow the command's own class; otherwise all classes by their
        priors.
    retained: what a predictor expects least of the next tokens is evicted first.
    read_ahead: what it expects most of the next token is read before it is asked for.
    layer_ahead: what a predictor of a token's next layer expects most is read while the token is at
        the present one.
    offline: knows the future (Belady 1966): no policy that reads on demand can have more hits.
    """

    name: str
    pinned: float = 0.0
    warmed: bool = False
    by_class: bool = False
    retained: bool = False
    read_ahead: bool = False
    layer_ahead: bool = False
    offline: bool = False

    @property
    def needs_map(self) -> bool:
        return bool(self.pinned or self.warmed)

    @property
    def without_map(self) -> str:
        """The policy that is left of it."""
        if self.layer_ahead:
            return "layer-ahead"
        return "predictor-retained" if self.retained else "lru"

    @property
    def needs_predictor(self) -> str:
        """Of what: "tokens" that come, a token's "next layer", or nothing."""
        if self.layer_ahead:
            return "next layer"
        return "tokens" if self.retained or self.read_ahead else ""


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("lru"),
        Policy("global-pinned", pinned=0.5),
        Policy("map-pinned", pinned=0.5, by_class=True),
        Policy("global-warmed", warmed=True),
        Policy("map-warmed", warmed=True, by_class=True),
        Policy("predictor-retained", retained=True),
        Policy("pinned-retained", pinned=0.5, by_class=True, retained=True),
        Policy("read-ahead", retained=True, read_ahead=True),
        Policy("layer-ahead", layer_ahead=True),
        Policy("map-layer-ahead", warmed=True, by_class=True, layer_ahead=True),
        Policy("belady", offline=True),
    )
}
DEFAULT = POLICIES["map-layer-ahead"]  # of artifacts that name none


def followed(name: str) -> Policy:
    """The policy of this name that the daemon is to follow, DEFAULT where it is empty. Raises
    EmberdError for one that does not exist, or that only `emberc simulate` has."""
    if not name:
        return DEFAULT
    known = ", ".join(policy.name for policy in POLICIES.values() if not policy.offline)
    if name not in POLICIES:
        raise EmberdError(f"unknown policy {name!r:.80}; the daemon has {known}")
    if POLICIES[name].offline:
        raise EmberdError(f"only emberc simulate has the policy {name}; the daemon has {known}")
    return POLICIES[name]
