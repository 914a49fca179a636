"""A value in a sweep file means what it means in a config. The oracle is YAML's own reading of the sweep file."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gptctl.spec.sweep import yaml_text
from trainer.config import Override
from trainer.config.layers import load_tree
from trainer.config.tree import List, Map, Node, Scalar, is_null
from trainer.errors import Place

PLACE = Place("sweep.yaml", 1)
# Every character that means something to YAML, to a shell or to a reader.
TEXT = st.text("ab 1e-.,:;#'\"[]{}&*!|>%@`$()?~=/\\\n\té中", max_size=8)
PLAIN = st.sampled_from(["1e3", "null", "~", "no", "a b", "x, y", "a: b", "$(rm)", "-o", "it's", "[x", "{", "1,2", ""])
SCALARS = st.builds(Scalar, TEXT, st.just(PLACE), st.just(True)) | st.builds(Scalar, PLAIN, st.just(PLACE))
KEYS = st.text("ab .,:#'\"\n", min_size=1, max_size=4)
NODES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(lambda items: List(tuple(items), PLACE))
        | st.dictionaries(KEYS, inner, min_size=1, max_size=3).map(lambda items: Map(items, PLACE))
    ),
    max_leaves=6,
)


def meaning(node: Node) -> object:
    """What the keys see: text, or nothing. `1e3` in quotes is text, too."""
    if isinstance(node, List):
        return [meaning(item) for item in node.items]
    if isinstance(node, Map):
        return {key: meaning(item) for key, item in node.items.items()}
    return None if is_null(node) else node.text


@given(NODES)
def test_a_value_is_not_changed_on_its_way(node: Node) -> None:
    # A plain text cannot begin with a bracket or a quote at the top: YAML would have read it as one.
    if isinstance(node, Scalar) and not node.quoted and node.text[:1] in ("[", "{"):
        return
    found: list = []
    tree = load_tree(None, [Override("Launch.x", yaml_text(node), "sweep")], found)
    launch = tree.items["Launch"]
    assert isinstance(launch, Map)
    assert not found
    assert meaning(launch.items["x"]) == meaning(node)
