//! A worker's shard layout, from Python's `kvlane.connector.shard_layout`.

use kvlane_block::{Axis, Dimension, HeadPlace, Heads, LayerLayout, ShardLayout, ShardPlace};
use kvlane_proto::shard_layout::encode_shard_layout;
use pyo3::prelude::*;

use crate::convert::value_error;

/// Fields as the Python class of that name has them.
#[derive(FromPyObject)]
pub(crate) struct PyShardLayout {
    index: u32,
    holders: u32,
    tensor_parallel: u32,
    pipeline_parallel: u32,
    layers: Vec<PyLayerLayout>,
}

#[derive(FromPyObject)]
struct PyLayerLayout {
    name: String,
    part: u32,
    dtype: String,
    element_bytes: u32,
    backend: String,
    dimensions: Vec<PyDimension>,
    heads: Option<PyHeads>,
    tokens: Option<u32>,
}

#[derive(FromPyObject)]
struct PyDimension {
    axis: String,
    index: Option<u32>,
    size: u32,
}

#[derive(FromPyObject)]
struct PyHeads {
    count: u32,
    size: u32,
    place: Option<(u32, u32)>,
}

/// The layouts of `groups` groups. A layout that no one could decode is left out and logged, because it only explains.
pub(crate) fn shard_layouts(
    shards: Option<Vec<Option<PyShardLayout>>>,
    groups: usize,
) -> PyResult<Vec<Option<ShardLayout>>> {
    let Some(shards) = shards else { return Ok(Vec::new()) };
    if shards.len() != groups {
        return Err(value_error(format!("layouts of {} groups came with {groups} groups", shards.len())));
    }
    let one = |shard: Option<PyShardLayout>| {
        let Some(layout) = shard.map(shard_layout).transpose()? else { return Ok(None) };
        if let Err(error) = encode_shard_layout(&layout) {
            // Log: `kvlane status` cannot explain differences between this engine's layout and others; caching
            // works. Do: report it, with the model and its settings.
            tracing::warn!("cannot describe this worker's shard layout to the daemon: {error}");
            return Ok(None);
        }
        Ok(Some(layout))
    };
    shards.into_iter().map(one).collect()
}

fn shard_layout(shard: PyShardLayout) -> PyResult<ShardLayout> {
    let PyShardLayout { index, holders, tensor_parallel, pipeline_parallel, layers } = shard;
    let place = ShardPlace { index, holders, tensor_parallel, pipeline_parallel };
    Ok(ShardLayout { place, layers: layers.into_iter().map(layer).collect::<PyResult<_>>()? })
}

fn layer(layer: PyLayerLayout) -> PyResult<LayerLayout> {
    let dimension = |PyDimension { axis, index, size }: PyDimension| {
        let known = Axis::from_name(&axis);
        let axis =
            known.ok_or_else(|| value_error(format!("'{axis}' is nothing that a dimension counts")))?;
        Ok(Dimension { axis, index, size })
    };
    let heads = |PyHeads { count, size, place }: PyHeads| Heads {
        count,
        size,
        place: place.map(|(first, total)| HeadPlace { first, total }),
    };
    Ok(LayerLayout {
        name: layer.name,
        part: layer.part,
        dtype: layer.dtype,
        element_bytes: layer.element_bytes,
        backend: layer.backend,
        dimensions: layer.dimensions.into_iter().map(dimension).collect::<PyResult<_>>()?,
        heads: layer.heads.map(heads),
        tokens: layer.tokens,
    })
}
