//! Members, and the scheduler's nodes as they follow from them.

use std::{collections::HashMap, sync::Arc, time::Instant};

use parking_lot::Mutex;
use tokio::sync::mpsc::UnboundedSender;

use super::{
    control::Listed,
    event::{Change, Event, Refusal, Spec},
    state::Members,
};
use crate::{
    address::Address,
    schedule::{Condition, Node, NodeId, NodeState, Role},
    shared::Shared,
};

/// Models of a node that are listed.
const MODELS_LISTED: usize = 16;

/// What all that tells of nodes shares.
#[derive(Debug)]
pub(super) struct Inner {
    pub(super) shared: Arc<Shared>,
    book: Mutex<Book>,
    /// Hears of each node that has joined: as many as may join.
    joined: UnboundedSender<(NodeId, Address)>,
}

#[derive(Debug, Default)]
struct Book {
    members: Members,
    nodes: HashMap<Address, NodeId>,
}

impl Inner {
    pub(super) fn new(shared: Arc<Shared>, joined: UnboundedSender<(NodeId, Address)>) -> Self {
        Self { shared, book: Mutex::default(), joined }
    }

    /// Something has happened.
    ///
    /// # Errors
    /// It changes nothing.
    pub(super) fn tell(&self, event: Event) -> Result<(), Refusal> {
        let mut book = self.book.lock();
        let changes = book.members.tell(event, Instant::now())?;
        for change in changes {
            self.carry_out(&mut book, change);
        }
        Ok(())
    }

    fn carry_out(&self, book: &mut Book, change: Change) {
        match change {
            Change::Join { spec, .. } => self.join(book, spec),
            Change::Leave { address, why, .. } => {
                if let Some(id) = book.nodes.remove(&address) {
                    self.shared.remove(id);
                    tracing::info!(node = %address, "a node goes: {why}");
                }
            }
            Change::State { address, state, why } => {
                let Some(&id) = book.nodes.get(&address) else { return };
                let told = self.shared.with_scheduler(|scheduler| {
                    let node = scheduler.node_mut(id)?;
                    node.state = state;
                    Some((node.role, node.models.join(", ")))
                });
                let Some((role, models)) = told else { return };
                match state {
                    NodeState::Ready => tracing::info!(node = %address, %role, models, "a node is ready"),
                    NodeState::Draining => {
                        tracing::info!(node = %address, %role, "a node is draining: {why}")
                    }
                    NodeState::Suspect => {
                        tracing::warn!(node = %address, %role, "a node is suspect: {why}. It gets requests only where no other one is left");
                    }
                }
            }
            Change::KnownBy { address, known_by } => {
                let Some(&id) = book.nodes.get(&address) else { return };
                tracing::debug!(node = %address, by = known_by.names().join(", "), "a node is known");
                self.shared.with_scheduler(|scheduler| {
                    if let Some(node) = scheduler.node_mut(id) {
                        node.known_by = known_by;
                    }
                });
            }
            Change::HandsOver { address, connector, connector_address } => {
                let Some(&id) = book.nodes.get(&address) else { return };
                tracing::info!(node = %address, %connector, connector_address = connector_address.as_deref(), "a node has told how it hands over");
                self.shared.set_connector(id, connector, connector_address);
            }
        }
    }

    fn join(&self, book: &mut Book, spec: Spec) {
        let Spec { address, role, group, class, host, connector, connector_address, pool } = spec;
        tracing::info!(node = %address, %role, group = &*group, "a node joins");
        let mut node = Node::new(&address.to_string(), role, &group);
        (node.connector, node.connector_address) = (connector.unwrap_or_default(), connector_address);
        node.class = class;
        node.host = host.unwrap_or_else(|| address.host.as_str().into());
        // Whoever named it as a worker leaves it to the router what it does.
        node.may_flip = role == Role::Worker && self.shared.is_balancing();
        let id = self.shared.add(node, address.clone());
        if let Some(pool) = pool {
            self.shared.configure_pool(id, &pool);
        }
        book.nodes.insert(address.clone(), id);
        // The thread that asks it ends with this.
        let _ = self.joined.send((id, address));
    }

    /// Nodes that are to go and have nothing to do any more go.
    pub(super) fn end_idle(&self) {
        let idle: Vec<Address> = {
            let book = self.book.lock();
            let leaving = book.members.leaving();
            if leaving.is_empty() {
                return;
            }
            self.shared.with_scheduler(|scheduler| {
                let requests = |address: &Address| {
                    let node = book.nodes.get(address).and_then(|id| scheduler.node(*id));
                    node.map_or(0, |node| node.load.own_requests)
                };
                leaving.into_iter().filter(|address| requests(address) == 0).collect()
            })
        };
        for address in idle {
            let _ = self.tell(Event::Idle(address));
        }
    }

    /// All nodes, or one.
    pub(super) fn list(&self, only: Option<&Address>) -> Vec<Listed> {
        let (book, now) = (self.book.lock(), Instant::now());
        let named = |address: &Address| only.is_none_or(|only| only == address);
        let mut listed: Vec<Listed> = self.shared.with_scheduler(|scheduler| {
            let nodes = book.nodes.iter().filter(|(address, _)| named(address));
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
