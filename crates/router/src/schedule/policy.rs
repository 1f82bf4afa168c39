//! The policies by which one of several nodes is picked.

use std::{fmt, str::FromStr};

use thiserror::Error;

/// How a node is picked among those that could take a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// One at random, each with the same chance.
    Random,
    /// The one taken least recently.
    RoundRobin,
    /// The less loaded of two random ones.
    PowerOfTwo,
    /// The one with the fewest requests.
    LeastLoaded,
    /// The one that has most of the prompt, if it has at most half as much to prefill as another one and is not overloaded;
    /// else the least loaded.
    PrefixAffinity,
    /// The one with the least product of tokens to prefill and requests. Cached tokens of the prompt need no prefill.
    #[default]
    LeastWork,
    /// The one with the least predicted delay: time to the first token, plus a share of the delay for the node's other
    /// requests. Predictions are learned from first tokens. Until they are calibrated, and among nodes of one class, it goes
    /// by the least product of tokens to prefill and requests. Each node then counts four requests more. Decode nodes: by the
    /// same product among those that the prefill node reaches soonest and whose tokens come in time.
    LeastDelay,
}

/// A name that no policy has.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "{0} is no policy; choose one of random, round-robin, power-of-two, least-loaded, prefix-affinity, least-work, least-delay"
)]
pub struct UnknownPolicy(String);

impl Policy {
    /// In the order in which the error names them.
    pub const ALL: [Self; 7] = [
        Self::Random,
        Self::RoundRobin,
        Self::PowerOfTwo,
        Self::LeastLoaded,
        Self::PrefixAffinity,
        Self::LeastWork,
        Self::LeastDelay,
    ];

    /// As in flags, metrics and answers.
    pub fn name(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::RoundRobin => "round-robin",
            Self::PowerOfTwo => "power-of-two",
            Self::LeastLoaded => "least-loaded",
            Self::PrefixAffinity => "prefix-affinity",
            Self::LeastWork => "least-work",
            Self::LeastDelay => "least-delay",
        }
    }

    /// Whether it needs to know which nodes have which prefixes.
    pub fn needs_prefixes(self) -> bool {
        matches!(self, Self::PrefixAffinity | Self::LeastWork | Self::LeastDelay)
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|policy| policy.name() == name).ok_or_else(|| UnknownPolicy(name.into()))
    }
}
