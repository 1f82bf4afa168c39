//! The ways to choose one of several nodes.

use std::{fmt, str::FromStr};

use thiserror::Error;

/// How a node is chosen among those that could take a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// Any of them.
    Random,
    /// One after the other.
    RoundRobin,
    /// The less loaded of any two.
    PowerOfTwo,
    /// The one with the fewest requests.
    LeastLoaded,
    /// The one that has most of the prompt, if that is half of it and it is not overloaded; else the least loaded.
    PrefixAffinity,
    /// The one with the least product of tokens to prefill and requests, where what it has of the prompt is not prefilled.
    #[default]
    LeastWork,
    /// The one where the first token is predicted soonest, with a part of what the prompt keeps the others' tokens waiting. What
    /// nodes take is learned from first tokens. Until that is known, and among nodes of one class: the least
    /// product of tokens to prefill and requests, of which four more count than there are. Of decode nodes, those that the prefill
    /// node hands over to soonest, as long as their tokens come in time; of these by the same product.
    LeastDelay,
}

/// No policy has this name.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "{0} is no policy; choose one of random, round-robin, power-of-two, least-loaded, prefix-affinity, least-work, least-delay"
)]
pub struct UnknownPolicy(String);

impl Policy {
    /// All of them.
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

    /// Whether it asks who has which prefix.
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
