//! Names of blocks: the engine's hash, the namespace, and digests of how a block is cut.
//!
//! All are 16 opaque bytes, which are compared and hashed, never interpreted.

use std::fmt;

use thiserror::Error;
use xxhash_rust::xxh3::xxh3_128;

/// Length of every name in this module.
const NAME_BYTES: usize = 16;

/// Why bytes are not a name.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum HashError {
    /// The engine's block hash is too short to tell blocks apart.
    #[error(
        "a block hash needs at least 16 bytes, this one has {0}; choose a longer hash algorithm in the engine"
    )]
    TooShort(usize),
    /// A list of hashes does not divide into hashes.
    #[error("a list of 16-byte block hashes cannot be {0} bytes long")]
    NotAList(usize),
    /// A namespace or digest of another length.
    #[error("a {what} has 16 bytes, this one has {length}")]
    WrongLength {
        /// "namespace" or "layout digest".
        what: &'static str,
        /// Its length in bytes.
        length: usize,
    },
}

macro_rules! name {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub [u8; NAME_BYTES]);

        impl $name {
            /// The bytes as they travel on the wire.
            pub fn as_bytes(&self) -> &[u8; NAME_BYTES] {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }
    };
}

name! {
    /// The engine's hash of a block. It covers the block's tokens and everything before them.
    BlockHash
}
name! {
    /// Digest of everything that changes what the bytes mean: model, KV dtype, tokens a block, hash algorithm and seed, group.
    Namespace
}
name! {
    /// Digest of the shape of one shard: layers, heads, order of dimensions, dtype. Computed by the connector.
    LayoutDigest
}
name! {
    /// Digest of how a block is cut into shards. Engines of equal namespace and cut share blocks.
    CutDigest
}

fn exactly(what: &'static str, bytes: &[u8]) -> Result<[u8; NAME_BYTES], HashError> {
    bytes.try_into().map_err(|_| HashError::WrongLength { what, length: bytes.len() })
}

impl BlockHash {
    /// Takes the first 16 bytes of an engine's hash. The rest of a longer one (sha256) adds nothing that matters at 128 bits.
    pub fn from_engine(bytes: &[u8]) -> Result<Self, HashError> {
        bytes.first_chunk().copied().map(Self).ok_or(HashError::TooShort(bytes.len()))
    }
}

impl Namespace {
    /// Requires exactly 16 bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, HashError> {
        exactly("namespace", bytes).map(Self)
    }
}

impl LayoutDigest {
    /// Requires exactly 16 bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, HashError> {
        exactly("layout digest", bytes).map(Self)
    }
}

/// Splits concatenated 16-byte hashes, as they travel on the wire.
pub fn parse_hashes(bytes: &[u8]) -> Result<Vec<BlockHash>, HashError> {
    let (hashes, rest) = bytes.as_chunks::<NAME_BYTES>();
    if !rest.is_empty() {
        return Err(HashError::NotAList(bytes.len()));
    }
    Ok(hashes.iter().copied().map(BlockHash).collect())
}

/// How a block is cut: the layouts and sizes of its shards, in rank order.
#[derive(Debug, Clone, Copy)]
pub struct Cut;

impl Cut {
    /// The digest of a cut into `layouts.len()` shards of `shard_bytes` bytes each.
    ///
    /// # Panics
    /// If the two lists differ in length.
    pub fn of(layouts: &[LayoutDigest], shard_bytes: &[u64]) -> CutDigest {
        assert_eq!(layouts.len(), shard_bytes.len(), "one layout and one size for each shard");
        let mut text = Vec::with_capacity(layouts.len() * (NAME_BYTES + 8));
        for (layout, bytes) in layouts.iter().zip(shard_bytes) {
            text.extend_from_slice(&layout.0);
            text.extend_from_slice(&bytes.to_le_bytes());
        }
        CutDigest(xxh3_128(&text).to_le_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engine_hashes_are_cut_to_16_bytes_and_shorter_ones_refused() {
        let sha256: Vec<u8> = (0..32).collect();
        assert_eq!(BlockHash::from_engine(&sha256).unwrap().0[..], sha256[..16]);
        let error = BlockHash::from_engine(&sha256[..15]).unwrap_err();
        assert_eq!(error, HashError::TooShort(15));
        assert!(error.to_string().contains("this one has 15"));
    }

    #[test]
    fn a_list_divides_into_hashes_or_is_refused() {
        let bytes: Vec<u8> = (0..48).collect();
        let hashes = parse_hashes(&bytes).unwrap();
        assert_eq!(hashes.concat(), bytes);
        assert_eq!(parse_hashes(&[]).unwrap(), []);
        assert_eq!(parse_hashes(&bytes[..47]), Err(HashError::NotAList(47)));
    }

    trait Concat {
        fn concat(&self) -> Vec<u8>;
    }
    impl Concat for Vec<BlockHash> {
        fn concat(&self) -> Vec<u8> {
            self.iter().flat_map(|hash| hash.0).collect()
        }
    }

    #[test]
    fn names_print_as_hex() {
        let namespace = Namespace::from_bytes(&[0xab; 16]).unwrap();
        assert_eq!(namespace.to_string(), "ab".repeat(16));
        assert_eq!(format!("{namespace:?}"), "ab".repeat(16));
        assert!(Namespace::from_bytes(&[0; 17]).unwrap_err().to_string().contains("17"));
        assert!(LayoutDigest::from_bytes(&[0; 3]).unwrap_err().to_string().contains("layout digest"));
    }

    #[test]
    fn a_cut_tells_layouts_sizes_and_order_apart() {
        let (a, b) = (LayoutDigest([1; 16]), LayoutDigest([2; 16]));
        let cut = Cut::of(&[a, b], &[4096, 8192]);
        assert_eq!(cut, Cut::of(&[a, b], &[4096, 8192]));
        for other in
            [Cut::of(&[b, a], &[4096, 8192]), Cut::of(&[a, b], &[8192, 4096]), Cut::of(&[a], &[4096])]
        {
            assert_ne!(cut, other);
        }
    }
}
