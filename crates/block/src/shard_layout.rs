//! The description of a shard: the layers, dimensions and heads that its bytes consist of. Two sides can compare theirs.
//!
//! A [`LayoutDigest`](crate::LayoutDigest) says whether two shards have the same bytes. The description says which bytes:
//!
//! ```text
//!  the shard's bytes of one block, as they lie in the pool
//!  +--------------------------+--------------------------+-----
//!  | model.layers.0.self_attn | model.layers.1.self_attn | ...    layers in this order, each with its data type
//!  +--------------------------+--------------------------+-----
//!    token 16, head 4, content 256                                its dimensions, the outermost in memory first
//! ```
//!
//! The addresses of the bytes in an engine, and their pieces, are not described. They are a [`Region`](crate::Region), and
//! engines whose regions differ share blocks.

use std::{collections::HashSet, fmt};

use thiserror::Error;

/// Most layers of a description. Each part of a layer's state counts as one.
pub const LAYERS_MAX: usize = 4096;
/// Most dimensions of a layer.
pub const DIMENSIONS_MAX: usize = 8;
/// Longest name of a layer, in bytes.
pub const LAYER_NAME_MAX: usize = 256;
/// Longest name of a data type or of an attention backend, in bytes.
pub const SHORT_NAME_MAX: usize = 64;

/// A shard: the part of a block that one worker stores, or that several hold alike and share.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ShardLayout {
    /// The shard's number, and how the model is split.
    pub place: ShardPlace,
    /// In the order in which they lie in the pool.
    pub layers: Vec<LayerLayout>,
}

/// The position of a shard among those of its engine's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ShardPlace {
    /// Number of the shard: the rank, divided by `holders`.
    pub index: u32,
    /// Consecutive ranks that hold the same bytes; 1 for a rank with bytes of its own.
    pub holders: u32,
    /// Ranks that a layer is split over.
    pub tensor_parallel: u32,
    /// Stages that the layers are split over.
    pub pipeline_parallel: u32,
}

/// A layer's cache, or one of several states that it consists of.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LayerLayout {
    /// The engine's name for the layer. A cache that layers share is stored once, under the first one's name.
    pub name: String,
    /// Position among the layer's states; 0 for attention.
    pub part: u32,
    /// In torch's words: "torch.bfloat16".
    pub dtype: String,
    /// Bytes of one number.
    pub element_bytes: u32,
    /// Name of the attention backend, because two may order the bytes of one shape differently. May be empty.
    pub backend: String,
    /// The outermost in memory first. Dimensions of size 1 are left out.
    pub dimensions: Vec<Dimension>,
    /// None if the layer has no heads, or the engine does not say.
    pub heads: Option<Heads>,
    /// Tokens of a block; None if the engine does not say.
    pub tokens: Option<u32>,
}

/// One dimension of a layer's part of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Dimension {
    /// The unit that the dimension counts.
    pub axis: Axis,
    /// Its number among the dimensions of the engine's tensor, not counting that of the blocks. None for kernel blocks, which
    /// are a part of the blocks' dimension.
    pub index: Option<u32>,
    /// Its length, in units of `axis`.
    pub size: u32,
}

/// The unit of a dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Axis {
    /// The engine does not say.
    Untold,
    /// Blocks of the attention kernel, several of which make one block.
    KernelBlock,
    /// Layers whose heads are interleaved, so that they are one cache.
    Layer,
    /// Keys and values: size 2.
    Half,
    /// KV heads of this worker.
    Head,
    /// Tokens of one block.
    Token,
    /// Numbers of a token in a head: keys, values, both, or a latent vector.
    Content,
    /// Numbers of a state-space layer's state.
    State,
}

/// The KV heads of a layer in this worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Heads {
    /// Heads of this worker.
    pub count: u32,
    /// Numbers of a key.
    pub size: u32,
    /// Their position among the model's heads; None if the engine does not say.
    pub place: Option<HeadPlace>,
}

/// The position of a worker's KV heads among all of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HeadPlace {
    /// The first of them.
    pub first: u32,
    /// All heads of the layer.
    pub total: u32,
}

/// Why a description is refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum DescriptionError {
    /// No or too many layers.
    #[error("a shard is described with {0} layers; 1 to {LAYERS_MAX} are possible")]
    LayerCount(usize),
    /// A text that is no name.
    #[error(
        "{what} has {bytes} bytes or characters that are not printed; 1 to {most} printed ones are possible"
    )]
    Name {
        /// "a layer's name", "a data type".
        what: &'static str,
        /// Length of the text.
        bytes: usize,
        /// Longest length that is possible.
        most: usize,
    },
    /// A number that must not be zero.
    #[error("{what} of a described shard is 0")]
    Zero {
        /// "tensor-parallel size", "a dimension's size".
        what: &'static str,
    },
    /// More dimensions than any cache has.
    #[error("layer {layer} is described with {count} dimensions; at most {DIMENSIONS_MAX} are possible")]
    DimensionCount {
        /// Name of the layer.
        layer: String,
        /// Dimensions of the layer.
        count: usize,
    },
    /// The same layer again.
    #[error("layer {layer} is described twice")]
    Repeated {
        /// Its name, with its part.
        layer: String,
    },
    /// Heads that the layer does not have.
    #[error("layer {layer} is described with {count} heads from number {first} on, of {total}")]
    Heads {
        /// Name of the layer.
        layer: String,
        /// Heads of the worker.
        count: u32,
        /// The first of them.
        first: u32,
        /// All heads of the layer.
        total: u32,
    },
    /// A shard beyond the engine's last rank.
    #[error("shard {index} of {holders} rank(s) each is described, of an engine with {ranks} rank(s)")]
    Place {
        /// Number of the shard.
        index: u32,
        /// Ranks that hold the shard.
        holders: u32,
        /// Ranks of the engine.
        ranks: u64,
    },
    /// More bytes than can be counted.
    #[error("the described layers have more than 2^64 bytes in a block")]
    Size,
}

impl ShardLayout {
    /// Checks that the description is within the bounds, and names each layer once.
    ///
    /// # Errors
    /// [`DescriptionError`] names the first fault.
    pub fn check(&self) -> Result<(), DescriptionError> {
        self.place.check()?;
        if self.layers.is_empty() || self.layers.len() > LAYERS_MAX {
            return Err(DescriptionError::LayerCount(self.layers.len()));
        }
        let mut seen = HashSet::with_capacity(self.layers.len());
        for layer in &self.layers {
            layer.check()?;
            if !seen.insert((&layer.name, layer.part)) {
                return Err(DescriptionError::Repeated { layer: layer.to_string() });
            }
        }
        self.checked_bytes().ok_or(DescriptionError::Size).map(drop)
    }

    /// Bytes of the shard in one block. For ranks that hold it alike: of all their slices. Saturates instead of wrapping.
    pub fn block_bytes(&self) -> u64 {
        self.checked_bytes().unwrap_or(u64::MAX)
    }

    fn checked_bytes(&self) -> Option<u64> {
        self.layers.iter().try_fold(0u64, |sum, layer| sum.checked_add(layer.checked_bytes()?))
    }

    /// Estimate of the memory that the description takes in this process.
    pub fn memory_bytes(&self) -> usize {
        let layer = |layer: &LayerLayout| {
            let texts = layer.name.capacity() + layer.dtype.capacity() + layer.backend.capacity();
            size_of::<LayerLayout>() + texts + layer.dimensions.capacity() * size_of::<Dimension>()
        };
        size_of::<Self>() + self.layers.iter().map(layer).sum::<usize>()
    }
}

impl ShardPlace {
    fn check(&self) -> Result<(), DescriptionError> {
        let Self { index, holders, tensor_parallel, pipeline_parallel } = *self;
        not_zero("the number of ranks that hold a part", holders)?;
        not_zero("the tensor-parallel size", tensor_parallel)?;
        not_zero("the pipeline-parallel size", pipeline_parallel)?;
        let ranks = u64::from(tensor_parallel) * u64::from(pipeline_parallel);
        if (u64::from(index) + 1) * u64::from(holders) > ranks {
            return Err(DescriptionError::Place { index, holders, ranks });
        }
        Ok(())
    }
}

impl LayerLayout {
    fn check(&self) -> Result<(), DescriptionError> {
        is_name("a layer's name", &self.name, 1..=LAYER_NAME_MAX)?;
        is_name("a data type", &self.dtype, 1..=SHORT_NAME_MAX)?;
        is_name("an attention backend's name", &self.backend, 0..=SHORT_NAME_MAX)?;
        not_zero("the size of a number", self.element_bytes)?;
        if self.dimensions.len() > DIMENSIONS_MAX {
            let (layer, count) = (self.name.clone(), self.dimensions.len());
            return Err(DescriptionError::DimensionCount { layer, count });
        }
        self.dimensions.iter().try_for_each(|dimension| not_zero("a dimension's size", dimension.size))?;
        not_zero("the number of tokens", self.tokens.unwrap_or(1))?;
        let Some(Heads { count, size, place }) = self.heads else { return Ok(()) };
        not_zero("the number of heads", count)?;
        not_zero("a head's size", size)?;
        match place {
            Some(HeadPlace { first, total }) if u64::from(first) + u64::from(count) > u64::from(total) => {
                Err(DescriptionError::Heads { layer: self.name.clone(), count, first, total })
            }
            _ => Ok(()),
        }
    }

    fn checked_bytes(&self) -> Option<u64> {
        let mut sizes = self.dimensions.iter().map(|dimension| u64::from(dimension.size));
        sizes.try_fold(u64::from(self.element_bytes), u64::checked_mul)
    }

    /// The letters of its dimensions, the outermost in memory first: in "NHC" tokens are outside of heads.
    fn order(&self) -> String {
        self.dimensions.iter().map(|dimension| dimension.axis.letter()).collect()
    }
}

fn not_zero(what: &'static str, number: u32) -> Result<(), DescriptionError> {
    if number == 0 { Err(DescriptionError::Zero { what }) } else { Ok(()) }
}

fn is_name(
    what: &'static str,
    text: &str,
    length: std::ops::RangeInclusive<usize>,
) -> Result<(), DescriptionError> {
    if length.contains(&text.len()) && !text.contains(char::is_control) {
        return Ok(());
    }
    Err(DescriptionError::Name { what, bytes: text.len(), most: *length.end() })
}

impl Axis {
    /// Each axis once, for `from_name`.
    pub const ALL: [Self; 8] = [
        Self::Untold,
        Self::KernelBlock,
        Self::Layer,
        Self::Half,
        Self::Head,
        Self::Token,
        Self::Content,
        Self::State,
    ];

    /// The word by which the connector names it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Untold => "untold",
            Self::KernelBlock => "kernel block",
            Self::Layer => "layer",
            Self::Half => "half",
            Self::Head => "head",
            Self::Token => "token",
            Self::Content => "content",
            Self::State => "state",
        }
    }

    /// The axis of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|axis| axis.name() == name)
    }

    /// Its letter in vLLM's names of layouts, such as BLNHC.
    fn letter(self) -> char {
        match self {
            Self::Untold => '?',
            Self::KernelBlock => 'K',
            Self::Layer => 'L',
            Self::Half => '2',
            Self::Head => 'H',
            Self::Token => 'N',
            Self::Content => 'C',
            Self::State => 'S',
        }
    }
}

/// Prints the layer's name, and its part unless that is 0.
impl fmt::Display for LayerLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.part {
            0 => f.write_str(&self.name),
            part => write!(f, "{} (part {part})", self.name),
        }
    }
}

impl fmt::Display for Heads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.place {
            Some(HeadPlace { total, .. }) if total != self.count => {
                write!(f, "{} of {total} KV heads x {}", self.count, self.size)
            }
            _ => write!(f, "{} KV heads x {}", self.count, self.size),
        }
    }
}

/// Prints a summary: "32 layers, 8 KV heads x 128, bfloat16, 16 tokens, HNC". A value that differs among the layers is listed,
/// up to three of them.
impl fmt::Display for ShardLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: HashSet<&str> = self.layers.iter().map(|layer| layer.name.as_str()).collect();
        write!(f, "{} layer{}", names.len(), if names.len() == 1 { "" } else { "s" })?;
        let layers = || self.layers.iter();
        let facts = [
            different(layers().filter_map(|layer| Some(layer.heads?.to_string()))),
            different(layers().map(|layer| layer.dtype.trim_start_matches("torch.").to_owned())),
            different(layers().filter_map(|layer| Some(format!("{} tokens", layer.tokens?)))),
            different(layers().map(LayerLayout::order)),
        ];
        facts.iter().filter(|fact| !fact.is_empty()).try_for_each(|fact| write!(f, ", {fact}"))
    }
}

/// Lists the distinct texts in the order of their first appearance, up to `NAMED`.
fn different(texts: impl Iterator<Item = String>) -> String {
    const NAMED: usize = 3;
    let mut found: Vec<String> = Vec::new();
    for text in texts.filter(|text| !text.is_empty()) {
        if found.contains(&text) {
            continue;
        }
        if found.len() == NAMED {
            return found.join(" / ") + " / ...";
        }
        found.push(text);
    }
    found.join(" / ")
}
