"""The static part of a State."""

import jax

from .._base._specs import is_spec
from .._base._types import Reduce, SpecTree


class Meta:
    """The static part of a State, kept in one object so that comparing two models is quick.

    The kind is a part of it: JAX takes two trees for equal whose nodes are dataclasses of different types.
    """

    __slots__ = ("_plain", "kind", "name", "reduce", "spec", "tag", "token")

    kind: type
    name: str | None
    tag: frozenset[str]
    spec: SpecTree
    reduce: Reduce
    # `Links` recognize a State by its token. It does not count when two are compared.
    token: object
    _plain: "Meta | None"

    def __init__(
        self,
        kind: type,
        name: str | None,
        tag: frozenset[str],
        spec: SpecTree,
        reduce: Reduce,
    ) -> None:
        self.kind = kind
        self.name, self.tag, self.spec, self.reduce = name, tag, spec, reduce
        self.token, self._plain = None, None

    @property
    def plain(self) -> "Meta":
        """The same without a token."""
        return self if self._plain is None else self._plain

    def with_token(self, token: object) -> "Meta":
        new = Meta(self.kind, self.name, self.tag, self.spec, self.reduce)
        new.token, new._plain = token, self.plain
        return new

    def __reduce__(self) -> tuple[object, ...]:
        return Meta, (self.kind, self.name, self.tag, self.spec, self.reduce)

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Meta)
            and self.kind is other.kind
            and self.name == other.name
            and self.tag == other.tag
            and self.spec == other.spec
            and self.reduce == other.reduce
        )

    def __hash__(self) -> int:
        # A spec may be a tree of specs, which need not be hashable; equal specs have equal leaves.
        specs = tuple(jax.tree_util.tree_leaves(self.spec, is_leaf=is_spec))
        return hash((self.kind, self.name, self.tag, specs, self.reduce))

    def __repr__(self) -> str:
        # JAX prints this where two structures differ.
        tag = sorted(self.tag)
        return f"name={self.name!r}, tag={tag}, spec={self.spec!r}, reduce={self.reduce!r}"
