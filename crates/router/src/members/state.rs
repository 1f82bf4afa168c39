//! All nodes, and what becomes of them: (event, time) gives changes.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Instant,
};

use super::{
    event::{Change, Event, Refusal, Spec},
    limits::{BEAT_MISSED, FORGOTTEN, NODES_MAX},
    member::{Drain, Member},
    whose::Whose,
};
use crate::{address::Address, schedule::Connector};

/// All nodes. Pure.
#[derive(Debug, Default)]
pub struct Members {
    /// By their names.
    members: BTreeMap<String, Member>,
    epoch: u64,
    /// Nodes that an operator has removed, and when they called last.
    removed: BTreeMap<String, Instant>,
}

impl Members {
    /// Something has happened.
    ///
    /// # Errors
    /// It changes nothing, for a reason that whoever caused it should know.
    pub fn tell(&mut self, event: Event, now: Instant) -> Result<Vec<Change>, Refusal> {
        let mut changes = Vec::new();
        match event {
            Event::Configured(spec) => {
                self.name(spec, &mut changes, |whose| whose.configured = true)?;
            }
            Event::Reconfigured(spec) => self.reconfigure(spec, &mut changes),
            Event::Unconfigured(address) => {
                if let Some(member) = self.members.get_mut(&address.to_string()) {
                    member.whose.configured = false;
                    drain_unnamed(member, now);
                }
            }
            Event::Unnamed(name) => {
                for member in self.members.values_mut() {
                    if member.whose.dns.remove(&name).is_some() {
                        drain_unnamed(member, now);
                    }
                }
            }
            Event::Added(spec) => self.add(spec, &mut changes)?,
            Event::Drained(address) => {
                let member = self.named(&address)?;
                // One that is to go goes on to go.
                if member.drain != Some(Drain::Go) {
                    member.drain = Some(Drain::Stay);
                }
            }
            Event::Removed { address, now: at_once } => self.remove(&address, at_once, now, &mut changes)?,
            Event::Beat(spec) => self.beat(&spec, now, &mut changes)?,
            Event::Bye(address) => self.bye(&address, now, &mut changes),
            Event::Resolved { name, like, hosts } => self.resolved(name, &like, &hosts, now, &mut changes)?,
            Event::Answered { address, at } => self.answered(&address, at, &mut changes),
            Event::Silent(address) => {
                if let Some(member) = self.members.get_mut(&address.to_string()) {
                    member.answers = false;
                }
            }
            Event::Idle(address) => {
                let key = address.to_string();
                match self.members.get(&key).and_then(|member| member.drain) {
                    Some(Drain::Go) => drop(self.leave(&key, "an operator has removed it", &mut changes)),
                    Some(Drain::Unnamed) => {
                        self.leave(&key, "the configuration does not name it any more", &mut changes);
                    }
                    Some(Drain::Stay) | None => {}
                }
            }
            Event::Tick => {
                self.removed.retain(|_, called| now.saturating_duration_since(*called) < FORGOTTEN)
            }
        }
        self.settle(now, &mut changes);
        Ok(changes)
    }

    /// Nodes that go as soon as they have nothing to do.
    pub fn leaving(&self) -> Vec<Address> {
        let goes = |member: &&Member| matches!(member.drain, Some(Drain::Go | Drain::Unnamed));
        let leaving = self.members.values().filter(goes);
        leaving.map(|member| member.spec.address.clone()).collect()
    }

    /// Forgets whom nobody knows, and tells what has become of the others.
    fn settle(&mut self, now: Instant, changes: &mut Vec<Change>) {
        let mut gone: Vec<String> = Vec::new();
        for (key, member) in &mut self.members {
            match (member.drain, member.whose.is_forgotten(member.answers, now)) {
                // The node leaves when it is idle.
                (Some(Drain::Unnamed), true) => {}
                (Some(Drain::Unnamed), false) => member.drain = None,
                (_, true) => gone.push(key.clone()),
                (_, false) => {}
            }
        }
        for key in gone {
            self.leave(&key, "nothing was heard of it for 30 s", changes);
        }
        for member in self.members.values_mut() {
            let known_by = member.whose.known_by();
            if member.told_known_by != known_by {
                member.told_known_by = known_by;
                changes.push(Change::KnownBy { address: member.spec.address.clone(), known_by });
            }
            let (state, why) = member.state(now);
            if member.told != state {
                member.told = state;
                changes.push(Change::State { address: member.spec.address.clone(), state, why });
            }
        }
    }

    fn named(&mut self, address: &Address) -> Result<&mut Member, Refusal> {
        self.members.get_mut(&address.to_string()).ok_or_else(|| Refusal::Unknown(address.clone()))
    }

    /// A source names a node: a new one, or one that is there with the same role and group. Flags, the file and DNS names replace
    /// a node that is known by beats only. They and operators also take the place of one if there is no room.
    fn name(
        &mut self,
        spec: Spec,
        changes: &mut Vec<Change>,
        note: impl FnOnce(&mut Whose),
    ) -> Result<(), Refusal> {
        let key = spec.address.to_string();
        let mut whose = Whose::default();
        note(&mut whose);
        let mut drain = None;
        if let Some(member) = self.members.get_mut(&key) {
            let Spec { role, group, .. } = &member.spec;
            if (role, group) == (&spec.role, &spec.group) {
                member.whose.merge(whose);
                hands_over(member, member.spec.connector.or(spec.connector), spec.connector_address, changes);
                return Ok(());
            }
            if !member.whose.is_only_beats() || whose.is_only_beats() || whose.added {
                let (role, group) = (*role, group.clone());
                return Err(Refusal::Differs { address: spec.address, role, group });
            }
            drain = member.drain;
            self.leave(&key, "a flag, the file or a name says that it is for something else", changes);
        }
        let others = self.members.values().filter(|member| !member.whose.configured).count();
        if !whose.configured && others >= NODES_MAX {
            let gives_way = self.gives_way().filter(|_| !whose.is_only_beats()).ok_or(Refusal::TooMany)?;
            self.leave(&gives_way, "known by beats only, and another node needs its place", changes);
        }
        self.join(key.clone(), spec, whose, changes);
        if let Some(member) = self.members.get_mut(&key) {
            member.drain = drain;
        }
        Ok(())
    }

    /// The node to evict among those known by beats only: one that does not answer, else the oldest.
    fn gives_way(&self) -> Option<String> {
        let only_beats = self.members.iter().filter(|(_, member)| member.whose.is_only_beats());
        only_beats.min_by_key(|(_, member)| (member.answers, member.epoch)).map(|(key, _)| key.clone())
    }

    fn join(&mut self, key: String, spec: Spec, whose: Whose, changes: &mut Vec<Change>) {
        self.epoch += 1;
        let member = Member::new(spec, self.epoch, whose);
        let told = Spec { connector: Some(member.connector()), ..member.spec.clone() };
        changes.push(Change::Join { spec: told, epoch: self.epoch });
        self.members.insert(key, member);
    }

    fn leave(&mut self, key: &str, why: &'static str, changes: &mut Vec<Change>) -> Option<Member> {
        let member = self.members.remove(key)?;
        changes.push(Change::Leave { address: member.spec.address.clone(), epoch: member.epoch, why });
        Some(member)
    }

    fn add(&mut self, spec: Spec, changes: &mut Vec<Change>) -> Result<(), Refusal> {
        let key = spec.address.to_string();
        self.name(spec, changes, |whose| whose.added = true)?;
        self.removed.remove(&key);
        if let Some(member) = self.members.get_mut(&key) {
            member.drain = None;
        }
        Ok(())
    }

    /// A node whose configuration differs joins anew. Requests of the former one go on, and count for no node.
    fn reconfigure(&mut self, spec: Spec, changes: &mut Vec<Change>) {
        let key = spec.address.to_string();
        self.removed.remove(&key);
        let differs = |member: &Member| {
            let is = &member.spec;
            (is.role, &is.group, &is.class, &is.host) != (spec.role, &spec.group, &spec.class, &spec.host)
                || is.pool != spec.pool
                || spec.connector.is_some() && is.connector != spec.connector
                || spec.connector_address.is_some() && is.connector_address != spec.connector_address
        };
        if let Some(member) = self.members.get_mut(&key) {
            member.whose.configured = true;
            // If an operator has removed the node, the operator's earlier addition no longer keeps it. An operator's drain stays.
            member.whose.added &= member.drain != Some(Drain::Go);
            member.drain = member.drain.filter(|drain| *drain == Drain::Stay);
            if !differs(member) {
                return;
            }
        }
        let former = self.leave(&key, "the configuration says something else of it now", changes);
        let (whose, at, drain) =
            former.map_or_else(Default::default, |former| (former.whose, former.at, former.drain));
        self.join(key.clone(), spec, Whose { configured: true, ..whose }, changes);
        if let Some(member) = self.members.get_mut(&key) {
            (member.at, member.drain) = (at, drain);
        }
    }

    fn remove(
        &mut self,
        address: &Address,
        at_once: bool,
        now: Instant,
        changes: &mut Vec<Change>,
    ) -> Result<(), Refusal> {
        let member = self.named(address)?;
        member.drain = Some(Drain::Go);
        let (key, at) = (address.to_string(), member.at);
        // Its beats may name it by its number.
        let by_number = at.map(|at| Address { rank: None, ..address.at_host(at.ip()) }.to_string());
        self.removed.extend([Some(key.clone()), by_number].into_iter().flatten().map(|name| (name, now)));
        if at_once {
            self.leave(&key, "an operator has removed it", changes);
        }
        Ok(())
    }

    /// A node that several know is one; a server's beat is that of all its ranks.
    fn beat(&mut self, spec: &Spec, now: Instant, changes: &mut Vec<Change>) -> Result<(), Refusal> {
        let refused = self.refuse_removed(&spec.address, now);
        let keys = self.keys_at(&spec.address);
        if keys.is_empty() {
            return refused.and_then(|()| self.name(spec.clone(), changes, |whose| whose.beat = Some(now)));
        }
        let mut refused = Ok(());
        for key in keys {
            let Some(member) = self.members.get_mut(&key) else { continue };
            let is_its_own = member.whose.is_only_beats();
            let has_moved = spec.connector_address.is_some()
                && member.spec.connector_address.is_some()
                && member.spec.connector_address != spec.connector_address;
            let is_other = (spec.role, &spec.group) != (member.spec.role, &member.spec.group);
            // What a beat says of a role counts only where nobody else has said it: anybody of --ping-allow may send one.
            if is_other && !is_its_own {
                let (role, group) = (member.spec.role, member.spec.group.clone());
                refused = Err(Refusal::Differs { address: spec.address.clone(), role, group });
                continue;
            }
            if has_moved || is_other {
                if member.restarted.is_some_and(|last| now.saturating_duration_since(last) < BEAT_MISSED) {
                    refused = Err(Refusal::TooOften(spec.address.clone()));
                    continue;
                }
                member.whose.beat = Some(now);
                self.restart(&key, spec, is_its_own, changes);
                if let Some(member) = self.members.get_mut(&key) {
                    member.restarted = Some(now);
                }
            } else {
                member.whose.beat = Some(now);
                hands_over(
                    member,
                    member.spec.connector.or(spec.connector),
                    spec.connector_address.clone(),
                    changes,
                );
            }
        }
        // What fits was taken nevertheless.
        if changes.is_empty() { refused } else { Ok(()) }
    }

    /// It is another engine now: what was known of the former one does not count.
    fn restart(&mut self, key: &str, spec: &Spec, is_its_own: bool, changes: &mut Vec<Change>) {
        let Some(former) = self.leave(key, "it has started anew", changes) else { return };
        let new = if is_its_own {
            spec.clone()
        } else {
            Spec {
                connector_address: spec.connector_address.clone(),
                connector: former.spec.connector.or(spec.connector),
                ..former.spec
            }
        };
        self.join(key.to_owned(), new, former.whose, changes);
        if let Some(member) = self.members.get_mut(key) {
            member.drain = former.drain;
            member.at = former.at;
        }
    }

    fn bye(&mut self, address: &Address, now: Instant, changes: &mut Vec<Change>) {
        for key in self.keys_at(address) {
            let Some(member) = self.members.get_mut(&key) else { continue };
            member.whose.beat = None;
            if member.whose.is_forgotten(member.answers, now) {
                self.leave(&key, "it said that it goes", changes);
            }
        }
    }

    fn resolved(
        &mut self,
        name: usize,
        like: &Spec,
        hosts: &[IpAddr],
        now: Instant,
        changes: &mut Vec<Change>,
    ) -> Result<(), Refusal> {
        let there: Vec<Address> = hosts.iter().map(|&host| like.address.at_host(host)).collect();
        let is_at = |member: &Member, address: &Address| {
            member.spec.address.rank == address.rank && member.is_at(address)
        };
        for member in self.members.values_mut() {
            let is_named = there.iter().any(|address| is_at(member, address));
            if let Some(gone) = member.whose.dns.get_mut(&name) {
                *gone = if is_named { None } else { Some(gone.unwrap_or(now)) };
            }
        }
        let mut refused = Ok(());
        for address in there {
            if self.refuse_removed(&address, now).is_err() && !self.members.contains_key(&address.to_string())
            {
                continue;
            }
            // Another name for a node that is there, and told its number when it answered.
            if let Some(member) = self.members.values_mut().find(|member| is_at(member, &address)) {
                let is_same = (member.spec.role, &member.spec.group) == (like.role, &like.group);
                if is_same && member.spec.address != address {
                    member.whose.dns.insert(name, None);
                    continue;
                }
            }
            let spec = Spec { address, ..like.clone() };
            let named = self.name(spec, changes, |whose| {
                whose.dns.insert(name, None);
            });
            refused = refused.and(named);
        }
        // What fits was taken nevertheless.
        if changes.is_empty() { refused } else { Ok(()) }
    }

    fn answered(&mut self, address: &Address, at: Option<SocketAddr>, changes: &mut Vec<Change>) {
        let key = address.to_string();
        let Some(member) = self.members.get_mut(&key) else { return };
        member.answers = true;
        member.at = at;
        // The name of one that is known by its number, too: its beats came before the name was known to mean it.
        let seen = member.clone();
        let twins: Vec<String> = self
            .members
            .iter()
            .filter(|(other, twin)| {
                **other != key
                    && twin.spec.address.rank.is_none_or(|rank| seen.spec.address.rank == Some(rank))
                    && seen.is_at(&twin.spec.address)
                    && !twin.whose.configured
            })
            .map(|(other, _)| other.clone())
            .collect();
        for twin in twins {
            let Some(twin) = self.leave(&twin, "it is known by another name too", changes) else { continue };
            let Some(member) = self.members.get_mut(&key) else { return };
            member.whose.merge(twin.whose);
            member.drain = member.drain.or(twin.drain);
            hands_over(
                member,
                member.spec.connector.or(twin.spec.connector),
                twin.spec.connector_address,
                changes,
            );
        }
    }

    /// All that are at this address: the ranks of one server.
    fn keys_at(&self, address: &Address) -> Vec<String> {
        self.members.iter().filter(|(_, member)| member.is_at(address)).map(|(key, _)| key.clone()).collect()
    }

    /// Notes that a removed node calls.
    fn refuse_removed(&mut self, address: &Address, now: Instant) -> Result<(), Refusal> {
        match self.removed.get_mut(&address.to_string()) {
            None => Ok(()),
            Some(called) => {
                *called = now;
                Err(Refusal::WasRemoved(address.clone()))
            }
        }
    }
}

/// The configuration no longer names this node. It drains if no other source names it.
fn drain_unnamed(member: &mut Member, now: Instant) {
    if member.whose.is_forgotten(member.answers, now) {
        member.drain.get_or_insert(Drain::Unnamed);
    }
}

/// Notes how a node hands over, if that is new.
fn hands_over(
    member: &mut Member,
    connector: Option<Connector>,
    connector_address: Option<Arc<str>>,
    changes: &mut Vec<Change>,
) {
    let before = (member.connector(), member.spec.connector_address.clone());
    member.spec.connector = connector;
    member.spec.connector_address = connector_address.or(member.spec.connector_address.take());
    let after = (member.connector(), member.spec.connector_address.clone());
    if before != after {
        let address = member.spec.address.clone();
        changes.push(Change::HandsOver { address, connector: after.0, connector_address: after.1 });
    }
}
