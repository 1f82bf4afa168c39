//! The replacement policies that `kvlane serve` offers.

use std::{ffi::OsStr, str::FromStr};

use clap::{
    Arg, Command,
    builder::{PossibleValue, TypedValueParser},
};
use kvlane_policy::{Choice, PolicyKind};
use serde::{Deserialize, Deserializer, de};

/// A policy of a daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PolicyArg(pub(crate) Choice);

/// All policies, in the order of help and errors.
fn offered() -> impl Iterator<Item = Choice> {
    PolicyKind::SERVED.into_iter().map(Choice::Fixed).chain([Choice::Auto])
}

impl FromStr for PolicyArg {
    /// The names that exist. clap's message adds the text and the flag.
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        offered().find(|choice| choice.name() == text).map(Self).ok_or_else(|| {
            let others = PolicyKind::ALL.into_iter().filter(|kind| !PolicyKind::SERVED.contains(kind));
            format!(
                "kvlane serve offers {}; kvlane replay has {} too",
                listed(&offered().map(Choice::name).collect::<Vec<_>>()),
                listed(&others.map(PolicyKind::name).collect::<Vec<_>>()),
            )
        })
    }
}

/// As "a, b and c".
fn listed(names: &[&str]) -> String {
    match names {
        [first @ .., last] if !first.is_empty() => format!("{} and {last}", first.join(", ")),
        _ => names.concat(),
    }
}

impl<'de> Deserialize<'de> for PolicyArg {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(|error| de::Error::custom(format!("'{text}': {error}")))
    }
}

/// Parses the flag, and names the policies in its help.
#[derive(Clone)]
pub(crate) struct PolicyParser;

impl TypedValueParser for PolicyParser {
    type Value = PolicyArg;

    fn parse_ref(
        &self,
        command: &Command,
        arg: Option<&Arg>,
        value: &OsStr,
    ) -> Result<PolicyArg, clap::Error> {
        PolicyArg::from_str.parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(offered().map(|choice| PossibleValue::new(choice.name()))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_that_only_replays_have_is_refused_with_those_there_are() {
        for choice in offered() {
            assert_eq!(choice.name().parse(), Ok(PolicyArg(choice)));
        }
        for text in ["s3fifo", "sieve", "tinylfu", "best", "LRU", ""] {
            assert_eq!(
                text.parse::<PolicyArg>().unwrap_err(),
                "kvlane serve offers lru, arc, wtinylfu, learned and auto; kvlane replay has s3fifo, sieve and tinylfu too"
            );
        }
    }
}
