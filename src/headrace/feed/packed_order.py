"""The order of a PackedTokens over its open stores: which class of headrace.order answers for which settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.errors import ConfigError
from headrace.order import (
    BestFitOrder,
    ElasticBlend,
    ElasticOrder,
    EpochOrder,
    MegatronOrder,
    OrderRules,
    SampleOrder,
    blend_megatron,
)
from headrace.store import TokenStore

if TYPE_CHECKING:
    from headrace.feed.packed_tokens import PackedTokens


def open_order(source: PackedTokens, stores: Sequence[TokenStore]) -> SampleOrder:
    """ConfigError where there is not a single sample, or the settings ask for what the order has not."""
    try:
        order = _order_of(source, stores)
        _ = len(order)
    except OverflowError:
        raise ConfigError(
            f"num_samples={source.num_samples}, num_epochs={source.num_epochs} here: more samples than can be "
            "counted (2**63 - 1); lower them"
        ) from None
    return order


def _order_of(source: PackedTokens, stores: Sequence[TokenStore]) -> SampleOrder:
    rules, blend = source.order_rules, source.blend
    if blend.is_one_corpus:
        return _order_of_one(source, stores[0], rules)
    if source.is_computed:
        return _computed_blend(source, stores, rules, blend.weights)
    return blend_megatron([store.lengths for store in stores], rules, weights=blend.weights)


def _order_of_one(source: PackedTokens, store: TokenStore, rules: OrderRules) -> SampleOrder:
    if source.is_computed:
        return _computed(source, store, rules, 0)
    if source.num_epochs > 1:
        return EpochOrder(store.lengths, rules, num_epochs=source.num_epochs)
    return MegatronOrder(store.lengths, rules)


def _computed(source: PackedTokens, store: TokenStore, rules: OrderRules, corpus: int) -> BestFitOrder | ElasticOrder:
    """An order whose samples do not depend on how many there are."""
    if source.documents == "whole":
        return BestFitOrder(
            store.lengths,
            rules,
            num_epochs=source.num_epochs,
            pad_documents_to=source.pad_documents_to,
            corpus=corpus,
        )
    return ElasticOrder(
        store.lengths,
        store.pointers,
        rules,
        num_epochs=source.num_epochs,
        units_per_token=store.dtype.itemsize,
        corpus=corpus,
    )


def _computed_blend(
    source: PackedTokens, stores: Sequence[TokenStore], rules: OrderRules, weights: Sequence[float] | None
) -> ElasticBlend:
    """Of such orders, by samples that do not depend on how many there are either."""
    # Each may be asked for all samples of the blend, and ends nowhere before.
    orders = [_computed(source, store, rules, corpus) for corpus, store in enumerate(stores)]
    if weights is None:
        weights = [order.samples_per_epoch for order in orders]
        num_samples = rules.num_samples
        return ElasticBlend(orders, weights, num_samples=sum(map(len, orders)) if num_samples is None else num_samples)
    assert rules.num_samples is not None, "checked by PackedTokens"
    return ElasticBlend(orders, weights, num_samples=rules.num_samples)
