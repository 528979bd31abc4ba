"""Comparison of weight sources: a stream of files with a model in memory."""

import torch

from gccompress.shards import WeightStream
from gccompress.weight_source import WeightSource


def same(found: torch.Tensor | None, wanted: torch.Tensor | None) -> bool:
    """Whether two tensors agree in dtype, shape and every bit of their values."""
    if found is None or wanted is None:
        return found is wanted
    return found.dtype == wanted.dtype and torch.equal(found, wanted)


def assert_same_source(found: WeightStream, wanted: WeightSource) -> None:
    """Compare everything two sources of the same model say."""
    assert (found.num_layers, found.roles) == (wanted.num_layers, wanted.roles)
    assert found.spec is wanted.spec
    for role in found.roles:
        for layer in range(found.num_layers):
            shape = found.shape(role, layer)
            assert shape == wanted.shape(role, layer)
            weight = found.weight(role, layer)
            assert same(weight, wanted.weight(role, layer)), (role, layer)
            assert same(found.in_scale(role, layer), wanted.in_scale(role, layer)), (role, layer)
            assert same(found.out_scale(role, layer), wanted.out_scale(role, layer)), (role, layer)
            for start, stop in ((0, 1), (3, 21), (shape[0] - 5, shape[0]), (7, 7)):
                assert same(found.rows(role, layer, start, stop), weight[start:stop])
