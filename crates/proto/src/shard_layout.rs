//! Encodes and decodes a shard's layout: a `ShardLayout` message whose length is checked before it is decoded.

use bytes::Bytes;
use kvlane_block::{
    Axis, DescriptionError, Dimension, HeadPlace, Heads, LayerLayout, ShardLayout, ShardPlace,
};
use prost::Message;
use thiserror::Error;

use crate::v1::{self, dimension::Axis as WireAxis};

/// Longest description, in bytes. One layer takes about 100.
pub const DESCRIBED_BYTES_MAX: usize = 1 << 20;

/// Why bytes describe no shard.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum DescribedError {
    /// The description is longer than [`DESCRIBED_BYTES_MAX`].
    #[error("a shard's description has {0} bytes; at most {DESCRIBED_BYTES_MAX} are possible")]
    TooLong(usize),
    /// The bytes are no `ShardLayout` message.
    #[error("a shard's description cannot be read: {0}")]
    Unreadable(#[from] prost::DecodeError),
    /// The message contradicts itself, or exceeds a bound.
    #[error(transparent)]
    Wrong(#[from] DescriptionError),
}

/// Encodes a description. Equal descriptions have equal bytes.
///
/// # Errors
/// [`DescribedError::Wrong`] or [`DescribedError::TooLong`] if [`decode_shard_layout`] would refuse the result.
pub fn encode_shard_layout(layout: &ShardLayout) -> Result<Bytes, DescribedError> {
    layout.check()?;
    let bytes = to_wire(layout).encode_to_vec();
    if bytes.len() > DESCRIBED_BYTES_MAX {
        return Err(DescribedError::TooLong(bytes.len()));
    }
    Ok(bytes.into())
}

/// Decodes a description, and checks it by [`ShardLayout::check`].
///
/// # Errors
/// [`DescribedError`]: why the bytes are refused.
pub fn decode_shard_layout(bytes: &[u8]) -> Result<ShardLayout, DescribedError> {
    if bytes.len() > DESCRIBED_BYTES_MAX {
        return Err(DescribedError::TooLong(bytes.len()));
    }
    let layout = from_wire(v1::ShardLayout::decode(bytes)?);
    layout.check()?;
    Ok(layout)
}

fn to_wire(layout: &ShardLayout) -> v1::ShardLayout {
    let ShardPlace { index, holders, tensor_parallel, pipeline_parallel } = layout.place;
    let layers = layout.layers.iter().map(layer_to_wire).collect();
    v1::ShardLayout { index, holders, tensor_parallel, pipeline_parallel, layers }
}

fn layer_to_wire(layer: &LayerLayout) -> v1::LayerLayout {
    let dimension = |dimension: &Dimension| v1::Dimension {
        axis: axis_to_wire(dimension.axis).into(),
        index: dimension.index,
        size: dimension.size,
    };
    let heads = |Heads { count, size, place }: Heads| {
        let (first, total) = place.map_or((0, 0), |HeadPlace { first, total }| (first, total));
        v1::KvHeads { count, size, first, total }
    };
    v1::LayerLayout {
        name: layer.name.clone(),
        part: layer.part,
        dtype: layer.dtype.clone(),
        element_bytes: layer.element_bytes,
        backend: layer.backend.clone(),
        dimensions: layer.dimensions.iter().map(dimension).collect(),
        heads: layer.heads.map(heads),
        tokens: layer.tokens.unwrap_or(0),
    }
}

fn from_wire(layout: v1::ShardLayout) -> ShardLayout {
    let v1::ShardLayout { index, holders, tensor_parallel, pipeline_parallel, layers } = layout;
    let layers = layers.into_iter().map(layer_from_wire).collect();
    let place = ShardPlace { index, holders, tensor_parallel, pipeline_parallel };
    ShardLayout { place, layers }
}

fn layer_from_wire(layer: v1::LayerLayout) -> LayerLayout {
    let dimension = |dimension: &v1::Dimension| Dimension {
        axis: axis_from_wire(dimension.axis()),
        index: dimension.index,
        size: dimension.size,
    };
    let heads = match layer.heads {
        None => None,
        Some(v1::KvHeads { count, size, first: 0, total: 0 }) => Some(Heads { count, size, place: None }),
        Some(v1::KvHeads { count, size, first, total }) => {
            Some(Heads { count, size, place: Some(HeadPlace { first, total }) })
        }
    };
    LayerLayout {
        dimensions: layer.dimensions.iter().map(dimension).collect(),
        name: layer.name,
        part: layer.part,
        dtype: layer.dtype,
        element_bytes: layer.element_bytes,
        backend: layer.backend,
        heads,
        tokens: (layer.tokens > 0).then_some(layer.tokens),
    }
}

fn axis_to_wire(axis: Axis) -> WireAxis {
    match axis {
        Axis::Untold => WireAxis::Untold,
        Axis::KernelBlock => WireAxis::KernelBlock,
        Axis::Layer => WireAxis::Layer,
        Axis::Half => WireAxis::Half,
        Axis::Head => WireAxis::Head,
        Axis::Token => WireAxis::Token,
        Axis::Content => WireAxis::Content,
        Axis::State => WireAxis::State,
    }
}

fn axis_from_wire(axis: WireAxis) -> Axis {
    match axis {
        WireAxis::Untold => Axis::Untold,
        WireAxis::KernelBlock => Axis::KernelBlock,
        WireAxis::Layer => Axis::Layer,
        WireAxis::Half => Axis::Half,
        WireAxis::Head => Axis::Head,
        WireAxis::Token => Axis::Token,
        WireAxis::Content => Axis::Content,
        WireAxis::State => Axis::State,
    }
}
