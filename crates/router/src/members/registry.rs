//! Applies events to [`Members`] and carries the changes out at the scheduler, so that both always agree. All sources of events
//! share one.

use std::{collections::HashMap, sync::Arc, time::Instant};

use parking_lot::Mutex;
use tokio::sync::mpsc::UnboundedSender;

use super::{
    control::Listed,
    event::{Event, NodeChange, Refusal, Spec},
    state::Members,
};
use crate::{
    address::Address,
    recording::RecordedPage,
    schedule::{Condition, Node, NodeId, NodeState, Role},
    shared::Shared,
};

/// Most models of a node that `kvlane route list` gets.
const MODELS_LISTED: usize = 16;

/// The members, and the scheduler's node of each.
#[derive(Debug)]
pub(super) struct Registry {
    pub(super) shared: Arc<Shared>,
    state: Mutex<RegistryState>,
    /// Gets each node that joins, to be probed. Bounded by the limits on members.
    joined: UnboundedSender<(NodeId, Address)>,
}

#[derive(Debug, Default)]
struct RegistryState {
    members: Members,
    nodes: HashMap<Address, NodeId>,
}

impl Registry {
    pub(super) fn new(shared: Arc<Shared>, joined: UnboundedSender<(NodeId, Address)>) -> Self {
        Self { shared, state: Mutex::default(), joined }
    }

    /// Applies an event, and carries its changes out before any other event's.
    ///
    /// # Errors
    /// The event changes nothing.
    pub(super) fn apply(&self, event: Event) -> Result<(), Refusal> {
        let mut state = self.state.lock();
        let changes = state.members.apply(event, Instant::now())?;
        for change in changes {
            self.carry_out(&mut state, change);
        }
        Ok(())
    }

    fn carry_out(&self, registry: &mut RegistryState, change: NodeChange) {
        match change {
            NodeChange::Join { spec, .. } => self.join(registry, spec),
            NodeChange::Leave { address, why, .. } => {
                if let Some(id) = registry.nodes.remove(&address) {
                    self.shared.remove(id);
                    // Log: the router forgets this node, for the reason named; requests go to others. Do:
                    // nothing, unless it still runs: then see the reason.
                    tracing::info!(node = %address, "node removed: {why}");
                }
            }
            NodeChange::State { address, state, why } => {
                let Some(&id) = registry.nodes.get(&address) else { return };
                let node = self.shared.with_scheduler(|scheduler| {
                    let node = scheduler.node_mut(id)?;
                    node.state = state;
                    Some((node.role, node.models.join(", ")))
                });
                let Some((role, models)) = node else { return };
                match state {
                    // Log: the node answers and gets requests; the line has its role and models.
                    NodeState::Ready => tracing::info!(node = %address, %role, models, "node ready"),
                    NodeState::Draining => {
                        // Log: the node gets no new requests, and finishes those that it has. Do: `kvlane route
                        // add` lets it serve again.
                        tracing::info!(node = %address, %role, "node draining: {why}")
                    }
                    NodeState::Suspect => {
                        // Log: the node does not answer or its pings are missing; the router probes it, and uses
                        // it again when it answers. Do: look at the engine's log.
                        tracing::warn!(node = %address, %role, "node suspect: {why}; it gets requests only if no other node is left");
                    }
                }
            }
            NodeChange::KnownBy { address, known_by } => {
                let Some(&id) = registry.nodes.get(&address) else { return };
                tracing::debug!(node = %address, by = known_by.names().join(", "), "sources of a node changed");
                self.shared.with_scheduler(|scheduler| {
                    if let Some(node) = scheduler.node_mut(id) {
                        node.known_by = known_by;
                    }
                });
            }
            NodeChange::HandsOver { address, connector, connector_address } => {
                let Some(&id) = registry.nodes.get(&address) else { return };
                // Log: the node says that it hands prompts over by this connector now.
                tracing::info!(node = %address, %connector, connector_address = connector_address.as_deref(), "node's connector changed");
                self.shared.set_connector(id, connector, connector_address);
            }
        }
    }

    fn join(&self, registry: &mut RegistryState, spec: Spec) {
        let Spec { address, role, group, class, host, connector, connector_address, pool } = spec;
        // Log: the router knows a new node, and sends it requests as soon as it answers a probe.
        tracing::info!(node = %address, %role, group = &*group, "node joined");
        let mut node = Node::new(&address.to_string(), role, &group);
        (node.connector, node.connector_address) = (connector.unwrap_or_default(), connector_address);
        node.class = class;
        node.host = host.unwrap_or_else(|| address.host.as_str().into());
        // The role worker leaves it to the balancer what the node does.
        node.may_flip = role == Role::Worker && self.shared.is_balancing();
        let id = self.shared.add(node, address.clone());
        if let Some(pool) = pool {
            self.shared.configure_pool(id, &pool);
        }
        registry.nodes.insert(address.clone(), id);
        // Sending fails only when the probing thread has ended, at shutdown.
        let _ = self.joined.send((id, address));
    }

    /// Removes the nodes that are to leave and have no requests any more.
    pub(super) fn remove_idle(&self) {
        let idle: Vec<Address> = {
            let registry = self.state.lock();
            let leaving = registry.members.leaving();
            if leaving.is_empty() {
                return;
            }
            self.shared.with_scheduler(|scheduler| {
                let requests = |address: &Address| {
                    let node = registry.nodes.get(address).and_then(|id| scheduler.node(*id));
                    node.map_or(0, |node| node.load.own_requests)
                };
                leaving.into_iter().filter(|address| requests(address) == 0).collect()
            })
        };
        for address in idle {
            let _ = self.apply(Event::Idle(address));
        }
    }

    /// The next recorded requests; see [`Call::Record`](super::control::Call::Record).
    pub(super) fn recorded(&self, cursor: u64) -> RecordedPage {
        self.shared.recording.read(cursor, Instant::now())
    }

    /// All nodes, or only the one at this address, by role and name.
    pub(super) fn list(&self, only: Option<&Address>) -> Vec<Listed> {
        let (registry, now) = (self.state.lock(), Instant::now());
        let named = |address: &Address| only.is_none_or(|only| only == address);
        let mut listed: Vec<Listed> = self.shared.with_scheduler(|scheduler| {
            let nodes = registry.nodes.iter().filter(|(address, _)| named(address));
            let nodes = nodes.filter_map(|(_, id)| {
                let node = scheduler.node(*id)?;
                Some(Listed {
                    node: node.name.to_string(),
                    role: node.role.name().to_owned(),
                    group: node.group.to_string(),
                    connector: node.connector.name().to_owned(),
                    state: node.state.name().to_owned(),
                    known_by: node.known_by.names().into_iter().map(str::to_owned).collect(),
                    requests: node.load.own_requests,
                    condition: Condition::of(node, now),
                    models: node.models.iter().take(MODELS_LISTED).map(ToString::to_string).collect(),
                })
            });
            nodes.collect()
        });
        listed.sort_by(|one, other| (&one.role, &one.node).cmp(&(&other.role, &other.node)));
        listed
    }
}
