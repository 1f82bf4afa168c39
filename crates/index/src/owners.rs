//! The owners, by name and by number. Slots name an owner by number; a number is given out again once its owner is
//! forgotten and its slots are closed.

use std::collections::HashMap;
use std::sync::Arc;

use crate::owner::Owner;
use crate::refused::Refused;

#[derive(Debug, Default)]
pub(crate) struct Owners {
    numbers: HashMap<Arc<str>, u16>,
    list: Vec<Option<Owner>>,
}

impl Owners {
    pub(crate) fn len(&self) -> usize {
        self.numbers.len()
    }

    pub(crate) fn named(&mut self, name: &str) -> Option<(u16, &mut Owner)> {
        let number = *self.numbers.get(name)?;
        Some((number, self.list[usize::from(number)].as_mut()?))
    }

    /// The owner, if this is its epoch.
    pub(crate) fn current(&mut self, name: &str, epoch: u64) -> Result<(u16, &mut Owner), Refused> {
        let (number, owner) = self.named(name).ok_or(Refused::Unknown)?;
        let current = owner.epoch;
        match epoch {
            _ if epoch < current => Err(Refused::OldEpoch { epoch, current }),
            _ if epoch > current => Err(Refused::NotJoined { epoch, current }),
            _ if owner.is_gone => Err(Refused::Gone { epoch }),
            _ => Ok((number, owner)),
        }
    }

    pub(crate) fn numbered(&self, number: u16) -> Option<&Owner> {
        self.list.get(usize::from(number))?.as_ref()
    }

    pub(crate) fn numbered_mut(&mut self, number: u16) -> Option<&mut Owner> {
        self.list.get_mut(usize::from(number))?.as_mut()
    }

    pub(crate) fn add(&mut self, owner: Owner) {
        let free = self.list.iter().position(Option::is_none);
        let number = free.unwrap_or_else(|| {
            self.list.push(None);
            self.list.len() - 1
        });
        self.numbers.insert(owner.name.clone(), number as u16);
        self.list[number] = Some(owner);
    }

    pub(crate) fn remove(&mut self, number: u16) -> Option<Owner> {
        let owner = self.list.get_mut(usize::from(number))?.take()?;
        self.numbers.remove(&owner.name);
        Some(owner)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u16, &Owner)> {
        (0u16..).zip(&self.list).filter_map(|(number, owner)| Some((number, owner.as_ref()?)))
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Owner> {
        self.list.iter_mut().flatten()
    }
}
