//! Opens an engine's carriers.

use super::error::FabricError;
use super::options::Transport;
use crate::carriers::{Named, NewCarrier};
use crate::hub::socket_hub::CONTROL;
use crate::watch::Watch;

/// Opens the carriers of the list that the caller allows; None allows all. A carrier's index in the result is the owner of its
/// part of the watch.
pub(super) fn open(
    list: Vec<NewCarrier<'_>>,
    allowed: Option<Transport>,
    watch: &Watch,
) -> Result<Vec<Named>, FabricError> {
    let names: Vec<&'static str> = list.iter().map(|new| new.name).collect();
    if let Some((_, &name)) = names.iter().enumerate().find(|(at, name)| names[..*at].contains(*name)) {
        return Err(FabricError::SameCarrier(name));
    }
    let allowed = allowed.map_or(names.as_slice(), |Transport(allowed)| allowed);
    if let Some(&name) = allowed.iter().find(|name| !names.contains(name)) {
        return Err(FabricError::NoSuchCarrier { name, known: names.join(", ") });
    }
    let opened = list.into_iter().filter(|new| allowed.contains(&new.name));
    (0..CONTROL).zip(opened).map(|(place, new)| Ok((new.name, (new.open)(watch.of(place))?))).collect()
}
