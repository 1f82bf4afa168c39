//! The replacement policies by name, and which of them a cache runs. `replacement` says what a policy does, `factory` makes one.

use std::{fmt, str::FromStr};

/// The policies there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PolicyKind {
    /// [`Lru`](crate::policies::Lru)
    #[default]
    Lru,
    /// [`Arc`](crate::policies::Arc)
    Arc,
    /// [`S3Fifo`](crate::policies::S3Fifo)
    S3Fifo,
    /// [`Sieve`](crate::policies::Sieve)
    Sieve,
    /// [`TinyLfu`](crate::policies::TinyLfu)
    TinyLfu,
    /// [`WTinyLfu`](crate::policies::WTinyLfu)
    WTinyLfu,
    /// [`Learned`](crate::policies::Learned)
    Learned,
}

impl PolicyKind {
    /// All of them, the default first.
    pub const ALL: [Self; 7] =
        [Self::Lru, Self::Arc, Self::S3Fifo, Self::Sieve, Self::TinyLfu, Self::WTinyLfu, Self::Learned];

    /// Those that `kvlane serve` offers by name; docs/policies.md says why. Replays and [`Auto`](crate::Auto) have all.
    pub const SERVED: [Self; 4] = [Self::Lru, Self::Arc, Self::WTinyLfu, Self::Learned];

    /// The name that flags and reports use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Arc => "arc",
            Self::S3Fifo => "s3fifo",
            Self::Sieve => "sieve",
            Self::TinyLfu => "tinylfu",
            Self::WTinyLfu => "wtinylfu",
            Self::Learned => "learned",
        }
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for PolicyKind {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<Self, UnknownPolicy> {
        let kind = Self::ALL.into_iter().find(|kind| kind.name() == text);
        kind.ok_or_else(|| UnknownPolicy(text.to_owned()))
    }
}

/// Which policy a cache runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// This one.
    Fixed(PolicyKind),
    /// The one that shadow caches find best, see [`Auto`](crate::Auto).
    Auto,
}

impl Choice {
    /// What it begins with. The one that learns was at or near the best on every trace that was looked at, so that the others
    /// have to show that they are better (docs/policies.md).
    pub fn first(self) -> PolicyKind {
        match self {
            Self::Fixed(kind) => kind,
            Self::Auto => PolicyKind::Learned,
        }
    }

    /// The name that flags and reports use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fixed(kind) => kind.name(),
            Self::Auto => "auto",
        }
    }
}

impl Default for Choice {
    fn default() -> Self {
        Self::Fixed(PolicyKind::default())
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// There is no policy of this name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is no policy: use lru, arc, s3fifo, sieve, tinylfu, wtinylfu or learned")]
pub struct UnknownPolicy(String);
