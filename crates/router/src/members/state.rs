//! All members, and the rules by which events change them: (event, time) gives changes.
//!
//! - A node stays while at least one [source](super::sources) names it, and leaves when the last one has gone silent.
//! - Flags, the file, DNS names and operators decide a node's role and group. A beat decides only for nodes that nothing but
//!   beats names, because any sender in `--ping-allow` may send one.
//! - One engine may be known by a host name and by an IP address. Both are merged into one member as soon as a probe shows it.
//! - A node that an operator has removed stays away while it still sends beats.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Instant,
};

use super::{
    event::{Event, NodeChange, Refusal, Spec},
    limits::{BEAT_MISSED, FORGET_AFTER, NODES_MAX},
    member::{Drain, Member},
    sources::Sources,
};
use crate::{address::Address, schedule::Connector};

/// All members. Pure: no I/O, no clock.
#[derive(Debug, Default)]
pub struct Members {
    /// Keyed by the address's text.
    members: BTreeMap<String, Member>,
    /// Counts the nodes that have joined.
    epoch: u64,
    /// Addresses that an operator has removed, and when each last sent a beat.
    removed: BTreeMap<String, Instant>,
}

impl Members {
    /// Applies an event. Returns the changes that the scheduler's nodes need, in order.
    ///
    /// # Errors
    /// The event changes nothing; the refusal says why, for its source.
    pub fn apply(&mut self, event: Event, now: Instant) -> Result<Vec<NodeChange>, Refusal> {
        let mut changes = Vec::new();
        match event {
            Event::Configured(spec) => {
                self.name(spec, &mut changes, |sources| sources.configured = true)?;
            }
            Event::Reconfigured(spec) => self.reconfigure(spec, &mut changes),
            Event::Unconfigured(address) => {
                if let Some(member) = self.members.get_mut(&address.to_string()) {
                    member.sources.configured = false;
                    drain_unnamed(member, now);
                }
            }
            Event::Unnamed(name) => {
                for member in self.members.values_mut() {
                    if member.sources.dns.remove(&name).is_some() {
                        drain_unnamed(member, now);
                    }
                }
            }
            Event::Added(spec) => self.add(spec, &mut changes)?,
            Event::Drained(address) => {
                let member = self.named(&address)?;
                // A node that is to leave still leaves.
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
                        self.leave(&key, "the configuration no longer names it", &mut changes);
                    }
                    Some(Drain::Stay) | None => {}
                }
            }
            Event::Tick => {
                self.removed.retain(|_, called| now.saturating_duration_since(*called) < FORGET_AFTER)
            }
        }
        self.settle(now, &mut changes);
        Ok(changes)
    }

    /// Nodes that leave as soon as they are idle.
    pub fn leaving(&self) -> Vec<Address> {
        let goes = |member: &&Member| matches!(member.drain, Some(Drain::Go | Drain::Unnamed));
        let leaving = self.members.values().filter(goes);
        leaving.map(|member| member.spec.address.clone()).collect()
    }

    /// Removes the nodes that no source keeps, and reports the other nodes' changes of state and sources.
    fn settle(&mut self, now: Instant, changes: &mut Vec<NodeChange>) {
        let mut gone: Vec<String> = Vec::new();
        for (key, member) in &mut self.members {
            match (member.drain, member.sources.is_forgotten(member.answers, now)) {
                // It leaves once it is idle.
                (Some(Drain::Unnamed), true) => {}
                (Some(Drain::Unnamed), false) => member.drain = None,
                (_, true) => gone.push(key.clone()),
                (_, false) => {}
            }
        }
        for key in gone {
            self.leave(&key, "no source has named it for 30 s", changes);
        }
        for member in self.members.values_mut() {
            let known_by = member.sources.known_by();
            if member.reported_known_by != known_by {
                member.reported_known_by = known_by;
                changes.push(NodeChange::KnownBy { address: member.spec.address.clone(), known_by });
            }
            let (state, why) = member.state(now);
            if member.reported_state != state {
                member.reported_state = state;
                changes.push(NodeChange::State { address: member.spec.address.clone(), state, why });
            }
        }
    }

    fn named(&mut self, address: &Address) -> Result<&mut Member, Refusal> {
        self.members.get_mut(&address.to_string()).ok_or_else(|| Refusal::Unknown(address.clone()))
    }

    /// A source names a node: a new one, or a member with the same role and group. Flags, the file and DNS names replace a
    /// member of another role that only beats name. At the limit, they and operators evict one that only beats name.
    fn name(
        &mut self,
        spec: Spec,
        changes: &mut Vec<NodeChange>,
        mark: impl FnOnce(&mut Sources),
    ) -> Result<(), Refusal> {
        let key = spec.address.to_string();
        let mut sources = Sources::default();
        mark(&mut sources);
        let mut drain = None;
        if let Some(member) = self.members.get_mut(&key) {
            let Spec { role, group, .. } = &member.spec;
            if (role, group) == (&spec.role, &spec.group) {
                member.sources.merge(sources);
                set_connector(
                    member,
                    member.spec.connector.or(spec.connector),
                    spec.connector_address,
                    changes,
                );
                return Ok(());
            }
            if !member.sources.is_only_beats() || sources.is_only_beats() || sources.added {
                let (role, group) = (*role, group.clone());
                return Err(Refusal::Differs { address: spec.address, role, group });
            }
            drain = member.drain;
            self.leave(&key, "a flag, the file or a DNS name gives it another role or group", changes);
        }
        let others = self.members.values().filter(|member| !member.sources.configured).count();
        if !sources.configured && others >= NODES_MAX {
            let victim = self.victim().filter(|_| !sources.is_only_beats()).ok_or(Refusal::TooMany)?;
            self.leave(&victim, "node limit reached, and only beats name it", changes);
        }
        self.join(key.clone(), spec, sources, changes);
        if let Some(member) = self.members.get_mut(&key) {
            member.drain = drain;
        }
        Ok(())
    }

    /// The node to evict among those that only beats name: the oldest that does not answer, else the oldest.
    fn victim(&self) -> Option<String> {
        let only_beats = self.members.iter().filter(|(_, member)| member.sources.is_only_beats());
        only_beats.min_by_key(|(_, member)| (member.answers, member.epoch)).map(|(key, _)| key.clone())
    }

    fn join(&mut self, key: String, spec: Spec, sources: Sources, changes: &mut Vec<NodeChange>) {
        self.epoch += 1;
        let member = Member::new(spec, self.epoch, sources);
        let spec = Spec { connector: Some(member.connector()), ..member.spec.clone() };
        changes.push(NodeChange::Join { spec, epoch: self.epoch });
        self.members.insert(key, member);
    }

    fn leave(&mut self, key: &str, why: &'static str, changes: &mut Vec<NodeChange>) -> Option<Member> {
        let member = self.members.remove(key)?;
        changes.push(NodeChange::Leave { address: member.spec.address.clone(), epoch: member.epoch, why });
        Some(member)
    }

    fn add(&mut self, spec: Spec, changes: &mut Vec<NodeChange>) -> Result<(), Refusal> {
        let key = spec.address.to_string();
        self.name(spec, changes, |sources| sources.added = true)?;
        self.removed.remove(&key);
        if let Some(member) = self.members.get_mut(&key) {
            member.drain = None;
        }
        Ok(())
    }

    /// A node whose configuration differs leaves and joins again. Requests to the former node continue, and count for no node.
    fn reconfigure(&mut self, spec: Spec, changes: &mut Vec<NodeChange>) {
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
            member.sources.configured = true;
            // An operator's removal also takes back the operator's earlier addition. An operator's drain stays.
            member.sources.added &= member.drain != Some(Drain::Go);
            member.drain = member.drain.filter(|drain| *drain == Drain::Stay);
            if !differs(member) {
                return;
            }
        }
        let former = self.leave(&key, "its configuration has changed", changes);
        let (sources, at, drain) =
            former.map_or_else(Default::default, |former| (former.sources, former.at, former.drain));
        self.join(key.clone(), spec, Sources { configured: true, ..sources }, changes);
        if let Some(member) = self.members.get_mut(&key) {
            (member.at, member.drain) = (at, drain);
        }
    }

    fn remove(
        &mut self,
        address: &Address,
        at_once: bool,
        now: Instant,
        changes: &mut Vec<NodeChange>,
    ) -> Result<(), Refusal> {
        let member = self.named(address)?;
        member.drain = Some(Drain::Go);
        let (key, at) = (address.to_string(), member.at);
        // Its beats may name it by its IP address.
        let by_ip = at.map(|at| Address { rank: None, ..address.at_host(at.ip()) }.to_string());
        self.removed.extend([Some(key.clone()), by_ip].into_iter().flatten().map(|name| (name, now)));
        if at_once {
            self.leave(&key, "an operator has removed it", changes);
        }
        Ok(())
    }

    /// Applies a beat to all members at its address: a server's beat is that of all its ranks. Without one, a new node joins.
    fn beat(&mut self, spec: &Spec, now: Instant, changes: &mut Vec<NodeChange>) -> Result<(), Refusal> {
        let refused = self.refuse_removed(&spec.address, now);
        let keys = self.keys_at(&spec.address);
        if keys.is_empty() {
            return refused
                .and_then(|()| self.name(spec.clone(), changes, |sources| sources.beat = Some(now)));
        }
        let mut refused = Ok(());
        for key in keys {
            let Some(member) = self.members.get_mut(&key) else { continue };
            let is_only_beats = member.sources.is_only_beats();
            let has_moved = spec.connector_address.is_some()
                && member.spec.connector_address.is_some()
                && member.spec.connector_address != spec.connector_address;
            let is_other = (spec.role, &spec.group) != (member.spec.role, &member.spec.group);
            // A beat may change the role only of a node that only beats name, because any sender in --ping-allow may send one.
            if is_other && !is_only_beats {
                let (role, group) = (member.spec.role, member.spec.group.clone());
                refused = Err(Refusal::Differs { address: spec.address.clone(), role, group });
                continue;
            }
            if has_moved || is_other {
                if member.restarted.is_some_and(|last| now.saturating_duration_since(last) < BEAT_MISSED) {
                    refused = Err(Refusal::TooOften(spec.address.clone()));
                    continue;
                }
                member.sources.beat = Some(now);
                self.restart(&key, spec, is_only_beats, changes);
                if let Some(member) = self.members.get_mut(&key) {
                    member.restarted = Some(now);
                }
            } else {
                member.sources.beat = Some(now);
                set_connector(
                    member,
                    member.spec.connector.or(spec.connector),
                    spec.connector_address.clone(),
                    changes,
                );
            }
        }
        // Changes that were not refused stand, so only an event without any is refused.
        if changes.is_empty() { refused } else { Ok(()) }
    }

    /// The engine has restarted: the member leaves and joins again, because nothing known of the former engine holds.
    fn restart(&mut self, key: &str, spec: &Spec, is_only_beats: bool, changes: &mut Vec<NodeChange>) {
        let Some(former) = self.leave(key, "it has restarted", changes) else { return };
        let new = if is_only_beats {
            spec.clone()
        } else {
            Spec {
                connector_address: spec.connector_address.clone(),
                connector: former.spec.connector.or(spec.connector),
                ..former.spec
            }
        };
        self.join(key.to_owned(), new, former.sources, changes);
        if let Some(member) = self.members.get_mut(key) {
            member.drain = former.drain;
            member.at = former.at;
        }
    }

    fn bye(&mut self, address: &Address, now: Instant, changes: &mut Vec<NodeChange>) {
        for key in self.keys_at(address) {
            let Some(member) = self.members.get_mut(&key) else { continue };
            member.sources.beat = None;
            if member.sources.is_forgotten(member.answers, now) {
                self.leave(&key, "its beats ended with a good-bye", changes);
            }
        }
    }

    fn resolved(
        &mut self,
        name: usize,
        like: &Spec,
        hosts: &[IpAddr],
        now: Instant,
        changes: &mut Vec<NodeChange>,
    ) -> Result<(), Refusal> {
        let there: Vec<Address> = hosts.iter().map(|&host| like.address.at_host(host)).collect();
        let is_at = |member: &Member, address: &Address| {
            member.spec.address.rank == address.rank && member.is_at(address)
        };
        for member in self.members.values_mut() {
            let is_named = there.iter().any(|address| is_at(member, address));
            if let Some(gone) = member.sources.dns.get_mut(&name) {
                *gone = if is_named { None } else { Some(gone.unwrap_or(now)) };
            }
        }
        let mut refused = Ok(());
        for address in there {
            if self.refuse_removed(&address, now).is_err() && !self.members.contains_key(&address.to_string())
            {
                continue;
            }
            // Another name of a member, as the address of its last probe shows.
            if let Some(member) = self.members.values_mut().find(|member| is_at(member, &address)) {
                let is_same = (member.spec.role, &member.spec.group) == (like.role, &like.group);
                if is_same && member.spec.address != address {
                    member.sources.dns.insert(name, None);
                    continue;
                }
            }
            let spec = Spec { address, ..like.clone() };
            let named = self.name(spec, changes, |sources| {
                sources.dns.insert(name, None);
            });
            refused = refused.and(named);
        }
        // Changes that were not refused stand, so only an event without any is refused.
        if changes.is_empty() { refused } else { Ok(()) }
    }

    fn answered(&mut self, address: &Address, at: Option<SocketAddr>, changes: &mut Vec<NodeChange>) {
        let key = address.to_string();
        let Some(member) = self.members.get_mut(&key) else { return };
        member.answers = true;
        member.at = at;
        // Merges members that are the same engine by its IP address: their beats came before this probe resolved the name.
        let seen = member.clone();
        let twins: Vec<String> = self
            .members
            .iter()
            .filter(|(other, twin)| {
                **other != key
                    && twin.spec.address.rank.is_none_or(|rank| seen.spec.address.rank == Some(rank))
                    && seen.is_at(&twin.spec.address)
                    && !twin.sources.configured
            })
            .map(|(other, _)| other.clone())
            .collect();
        for twin in twins {
            let Some(twin) = self.leave(&twin, "it is another node under a second address", changes) else {
                continue;
            };
            let Some(member) = self.members.get_mut(&key) else { return };
            member.sources.merge(twin.sources);
            member.drain = member.drain.or(twin.drain);
            set_connector(
                member,
                member.spec.connector.or(twin.spec.connector),
                twin.spec.connector_address,
                changes,
            );
        }
    }

    /// All members at this address: the ranks of one server.
    fn keys_at(&self, address: &Address) -> Vec<String> {
        self.members.iter().filter(|(_, member)| member.is_at(address)).map(|(key, _)| key.clone()).collect()
    }

    /// Refuses a node that an operator has removed, and extends its ban, because it still sends beats.
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

/// Drains a node that the configuration has dropped, if no other source names it.
fn drain_unnamed(member: &mut Member, now: Instant) {
    if member.sources.is_forgotten(member.answers, now) {
        member.drain.get_or_insert(Drain::Unnamed);
    }
}

/// Sets how a node hands over, and reports it if it changed.
fn set_connector(
    member: &mut Member,
    connector: Option<Connector>,
    connector_address: Option<Arc<str>>,
    changes: &mut Vec<NodeChange>,
) {
    let before = (member.connector(), member.spec.connector_address.clone());
    member.spec.connector = connector;
    member.spec.connector_address = connector_address.or(member.spec.connector_address.take());
    let after = (member.connector(), member.spec.connector_address.clone());
    if before != after {
        let address = member.spec.address.clone();
        changes.push(NodeChange::HandsOver { address, connector: after.0, connector_address: after.1 });
    }
}
