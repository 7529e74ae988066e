"""Graph algorithms that the control flow of PTX and of SASS share. Standard library only."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def strongly_connected_components(
    successors: Sequence[Sequence[int]] | Mapping[int, Sequence[int]],
    nodes: Collection[int],
    entry: int | None = None,
) -> list[set[int]]:
    """Strongly connected components of the subgraph of `nodes`, each after the components that it
    leads to.

    `successors`: the successors of every node; they need not be among `nodes`. `entry`: the node to
    begin with; the lowest if None.

    Tarjan's algorithm ("Depth-first search and linear graph algorithms", 1972), not recursive.
    """
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    on_stack: set[int] = set()
    stack: list[int] = []
    found: list[set[int]] = []
    for root in [*([] if entry is None else [entry]), *sorted(nodes)]:
        if root in index:
            continue
        work = [(root, iter([s for s in successors[root] if s in nodes]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, children = work[-1]
            child = next(children, None)
            if child is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = set()
                    while True:
                        member = stack.pop()
                        on_stack.discard(member)
                        component.add(member)
                        if member == node:
                            break
                    found.append(component)
            elif child not in index:
                index[child] = low[child] = len(index)
                stack.append(child)
                on_stack.add(child)
                work.append((child, iter([s for s in successors[child] if s in nodes])))
            elif child in on_stack:
                low[node] = min(low[node], index[child])
    return found


def innermost_loops(
    successors: Mapping[int, Sequence[int]], wanted: Collection[int]
) -> dict[int, set[int]]:
    """The nodes of the innermost loop around each wanted node that is in a loop. The head of every
    loop must be its lowest node; several loops may share it."""
    found: dict[int, set[int]] = {}
    graphs = [successors]
    while graphs:
        edges = graphs.pop()
        for nodes in strongly_connected_components(edges, edges):
            inside = nodes.intersection(wanted)
            head = min(nodes)
            if not inside or (len(nodes) == 1 and head not in edges[head]):
                continue
            inner = {n: [s for s in edges[n] if s in nodes and s != head] for n in nodes}
            loops = [{head} | _leading_to(n, inner) for n in nodes if head in edges[n]]
            for node in inside:
                found[node] = min((loop for loop in loops if node in loop), key=len)
            graphs.append(inner)
    return found


def _leading_to(node: int, successors: Mapping[int, Sequence[int]]) -> set[int]:
    """A node and all nodes from which a path leads to it."""
    found, before = {node}, 0
    while len(found) > before:
        before = len(found)
        found |= {n for n, following in successors.items() if not found.isdisjoint(following)}
    return found
