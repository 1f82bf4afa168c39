//! [`PolicyKind`] names the replacement policies; [`Choice`] says which of them a cache runs. `replacement` has the
//! trait that they implement, `factory` builds one.

use std::{fmt, str::FromStr};

/// Every replacement policy of this crate.
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
    /// All policies, the default first.
    pub const ALL: [Self; 7] =
        [Self::Lru, Self::Arc, Self::S3Fifo, Self::Sieve, Self::TinyLfu, Self::WTinyLfu, Self::Learned];

    /// The policies that `kvlane serve` offers by name; docs/policies.md says why. Replays and [`Auto`](crate::Auto)
    /// have all of them.
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

/// The policy that a cache runs: a fixed one, or whichever is best.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// Always the named policy.
    Fixed(PolicyKind),
    /// The policy that shadow caches find best, see [`Auto`](crate::Auto).
    Auto,
}

impl Choice {
    /// The policy that a cache starts with. Auto starts with `learned`, which was at or near the best on every trace
    /// that we replayed. So the others have to prove that they are better (docs/policies.md).
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

/// The text names no policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is no policy: use lru, arc, s3fifo, sieve, tinylfu, wtinylfu or learned")]
pub struct UnknownPolicy(String);
