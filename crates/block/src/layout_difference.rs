//! Compares the descriptions of two shards, and puts their differences into words.

use std::{collections::HashMap, fmt};

use thiserror::Error;

use crate::shard_layout::{Axis, Dimension, HeadPlace, Heads, LayerLayout, ShardLayout};

/// Differences that are put into words; the others are only counted.
const NAMED: usize = 3;

/// The aspect of a layout that differs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Aspect {
    /// Ranks that a layer is split over.
    TensorParallel,
    /// Stages that the layers are split over.
    PipelineParallel,
    /// Ranks that hold the same bytes.
    Holders,
    /// Number of the shard.
    Shard,
    /// Only one side has the layer.
    Presence,
    /// The layer has another position among the layers that both sides have.
    Order,
    /// The layer's KV heads: which ones, how many, and their size.
    Heads,
    /// Tokens of one block.
    Tokens,
    /// Data type or its size.
    DataType,
    /// The dimensions, or their order in memory.
    Dimensions,
    /// The attention backend.
    Backend,
}

/// One difference between the layout here and the one there.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LayoutDifference {
    /// The aspect in which they differ.
    pub aspect: Aspect,
    /// The layer's name and part; None if the whole shard differs.
    pub layer: Option<String>,
    /// The value here, in words.
    pub here: String,
    /// The value there, in words.
    pub there: String,
    /// False if only one side has a value. The bytes may be the same then.
    pub is_certain: bool,
}

impl fmt::Display for LayoutDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.aspect {
            Aspect::TensorParallel => "tensor-parallel size",
            Aspect::PipelineParallel => "pipeline-parallel size",
            Aspect::Holders => "ranks that hold the same blocks",
            Aspect::Shard => "shard",
            _ => "layer",
        };
        match &self.layer {
            Some(name) => write!(f, "{what} {name}: {} here, {} there", self.here, self.there),
            None => write!(f, "{what}: {} here, {} there", self.here, self.there),
        }
    }
}

/// All differences: first those of the shard as a whole, then those of its layers. Never empty.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub struct LayoutDifferences(Vec<LayoutDifference>);

impl LayoutDifferences {
    /// All differences, at least one.
    pub fn all(&self) -> &[LayoutDifference] {
        &self.0
    }

    /// Leaves out the differences in which only one side has a value. None if no other is left.
    pub fn certain(self) -> Option<Self> {
        Self::of(self.0.into_iter().filter(|difference| difference.is_certain).collect())
    }

    fn of(differences: Vec<LayoutDifference>) -> Option<Self> {
        (!differences.is_empty()).then_some(Self(differences))
    }
}

/// Prints the first three in words, and the number of the others.
impl fmt::Display for LayoutDifferences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named: Vec<String> = self.0.iter().take(NAMED).map(LayoutDifference::to_string).collect();
        f.write_str(&named.join("; "))?;
        match self.0.len().saturating_sub(NAMED) {
            0 => Ok(()),
            more => write!(f, "; and {more} more"),
        }
    }
}

impl ShardLayout {
    /// Checks that `other` describes the same bytes in the same words.
    ///
    /// # Errors
    /// All differences; `self` is here, `other` is there.
    pub fn compare(&self, other: &Self) -> Result<(), LayoutDifferences> {
        let mut found = Vec::new();
        let (here, there) = (self.place, other.place);
        for (aspect, here, there) in [
            (Aspect::TensorParallel, here.tensor_parallel, there.tensor_parallel),
            (Aspect::PipelineParallel, here.pipeline_parallel, there.pipeline_parallel),
            (Aspect::Holders, here.holders, there.holders),
            (Aspect::Shard, here.index, there.index),
        ] {
            if here != there {
                let (here, there) = (here.to_string(), there.to_string());
                found.push(LayoutDifference { aspect, layer: None, here, there, is_certain: true });
            }
        }
        compare_layers(&self.layers, &other.layers, &mut found);
        LayoutDifferences::of(found).map_or(Ok(()), Err)
    }
}

/// A layer with its position, on either side.
type Sides<'a> = (Option<(usize, &'a LayerLayout)>, Option<(usize, &'a LayerLayout)>);

fn compare_layers(here: &[LayerLayout], there: &[LayerLayout], found: &mut Vec<LayoutDifference>) {
    let mut layers: HashMap<(&str, u32), Sides<'_>> = HashMap::with_capacity(here.len());
    for (position, layer) in here.iter().enumerate() {
        layers.entry((&layer.name, layer.part)).or_default().0 = Some((position, layer));
    }
    for (position, layer) in there.iter().enumerate() {
        layers.entry((&layer.name, layer.part)).or_default().1 = Some((position, layer));
    }
    // Sorted by the lower of both positions, so that the order does not depend on which side compares.
    let mut layers: Vec<_> = layers.into_iter().collect();
    layers.sort_by_key(|(name, (here, there))| {
        let (here, there) = (here.map(|(position, _)| position), there.map(|(position, _)| position));
        (here.into_iter().chain(there).min(), *name)
    });
    // Layers are numbered among those that both sides have, so that a missing one does not move those behind it.
    let both = layers.iter().filter_map(|(_, (here, there))| Some((here.as_ref()?.0, there.as_ref()?.0)));
    let (mut all_here, mut all_there): (Vec<_>, Vec<_>) = both.unzip();
    all_here.sort_unstable();
    all_there.sort_unstable();
    let number = |positions: &[usize], position| positions.partition_point(|each| *each < position);
    for (_, sides) in layers {
        match sides {
            (Some((position_here, here)), Some((position_there, there))) => {
                let (first, second) = (number(&all_here, position_here), number(&all_there, position_there));
                if first != second {
                    let (first, second) = (format!("number {first}"), format!("number {second}"));
                    push(found, Aspect::Order, here, (first, second), true);
                }
                compare_layer(here, there, found);
            }
            (Some((_, layer)), None) => {
                push(found, Aspect::Presence, layer, ("present".into(), "missing".into()), true);
            }
            (None, Some((_, layer))) => {
                push(found, Aspect::Presence, layer, ("missing".into(), "present".into()), true);
            }
            (None, None) => {}
        }
    }
}

fn push(
    found: &mut Vec<LayoutDifference>,
    aspect: Aspect,
    layer: &LayerLayout,
    (here, there): (String, String),
    is_certain: bool,
) {
    found.push(LayoutDifference { aspect, layer: Some(layer.to_string()), here, there, is_certain });
}

fn compare_layer(here: &LayerLayout, there: &LayerLayout, found: &mut Vec<LayoutDifference>) {
    if here.heads != there.heads {
        let is_certain =
            here.heads.zip(there.heads).is_some_and(|(here, there)| heads_contradict(here, there));
        let texts = (heads_text(here.heads), heads_text(there.heads));
        push(found, Aspect::Heads, here, texts, is_certain);
    }
    if here.tokens != there.tokens {
        let text =
            |tokens: Option<u32>| tokens.map_or("tokens untold".into(), |count| format!("{count} tokens"));
        let is_certain = here.tokens.is_some() && there.tokens.is_some();
        push(found, Aspect::Tokens, here, (text(here.tokens), text(there.tokens)), is_certain);
    }
    if (&here.dtype, here.element_bytes) != (&there.dtype, there.element_bytes) {
        let text = |layer: &LayerLayout| format!("{} of {} bytes", layer.dtype, layer.element_bytes);
        push(found, Aspect::DataType, here, (text(here), text(there)), true);
    }
    if here.dimensions != there.dimensions {
        let (first, second) = (&here.dimensions, &there.dimensions);
        let mut texts = (dimensions_text(first, false), dimensions_text(second, false));
        if texts.0 == texts.1 {
            texts = (dimensions_text(first, true), dimensions_text(second, true));
        }
        push(found, Aspect::Dimensions, here, texts, dimensions_contradict(first, second));
    }
    if here.backend != there.backend {
        let text = |backend: &str| match backend {
            "" => "no attention backend".to_owned(),
            name => format!("attention backend {name}"),
        };
        push(found, Aspect::Backend, here, (text(&here.backend), text(&there.backend)), true);
    }
}

fn heads_contradict(here: Heads, there: Heads) -> bool {
    let places = here.place.zip(there.place);
    (here.count, here.size) != (there.count, there.size) || places.is_some_and(|(here, there)| here != there)
}

fn heads_text(heads: Option<Heads>) -> String {
    match heads {
        None => "KV heads untold".into(),
        Some(Heads { count, size, place: None }) => format!("{count} KV heads x {size}"),
        Some(Heads { count, size, place: Some(HeadPlace { first, total }) }) => {
            format!("{count} KV heads x {size} (from number {first}, of {total})")
        }
    }
}

fn dimensions_contradict(here: &[Dimension], there: &[Dimension]) -> bool {
    let differ = |(here, there): (&Dimension, &Dimension)| {
        let is_untold = here.axis == Axis::Untold || there.axis == Axis::Untold;
        (here.index, here.size) != (there.index, there.size) || here.axis != there.axis && !is_untold
    };
    here.len() != there.len() || here.iter().zip(there).any(differ)
}

fn dimensions_text(dimensions: &[Dimension], with_index: bool) -> String {
    let text = |dimension: &Dimension| {
        let (name, size) = (dimension.axis.name(), dimension.size);
        match dimension.index.filter(|_| with_index) {
            Some(index) => format!("{name} {size} (dimension {index})"),
            None => format!("{name} {size}"),
        }
    };
    match dimensions {
        [] => "a single number".into(),
        several => format!("[{}]", several.iter().map(text).collect::<Vec<_>>().join(", ")),
    }
}
