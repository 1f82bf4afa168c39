//! The nodes and DNS names of flags and the file, and what a reload of the file changes about them.

use std::{collections::BTreeMap, fmt, sync::Arc};

use tokio::{runtime::Handle, task::JoinHandle};

use super::{
    dns::{self, DnsName, Resolve},
    event::{Event, Refusal, Spec},
    registry::Registry,
};

/// The configured nodes, and the running look-ups of the configured names.
pub(super) struct Configured {
    registry: Arc<Registry>,
    resolver: Arc<dyn Resolve>,
    runtime: Handle,
    nodes: Vec<Spec>,
    names: Vec<Name>,
    /// Number of the next name. Numbers are never reused, so late records of a dropped name match nothing.
    next: usize,
}

struct Name {
    name: DnsName,
    number: usize,
    look_up: JoinHandle<()>,
}

/// Counts of the changes that a reload made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reconfigured {
    /// Nodes that the new configuration adds or changes.
    pub nodes_named: usize,
    /// Nodes that the new configuration no longer has.
    pub nodes_dropped: usize,
    /// Names that the new configuration adds.
    pub names_added: usize,
    /// Names that the new configuration no longer has.
    pub names_dropped: usize,
}

impl fmt::Debug for Configured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&DnsName> = self.names.iter().map(|name| &name.name).collect();
        f.debug_struct("Configured")
            .field("nodes", &self.nodes)
            .field("names", &names)
            .finish_non_exhaustive()
    }
}

impl Configured {
    /// Starts the look-ups of `names`. `nodes` have joined already.
    pub(super) fn start(
        registry: Arc<Registry>,
        resolver: Arc<dyn Resolve>,
        runtime: Handle,
        nodes: Vec<Spec>,
        names: Vec<DnsName>,
    ) -> Self {
        let mut configured = Self { registry, resolver, runtime, nodes, names: Vec::new(), next: 0 };
        names.into_iter().for_each(|name| configured.look_up(name));
        configured
    }

    /// Replaces the nodes and names.
    pub(super) fn change(&mut self, nodes: Vec<Spec>, names: Vec<DnsName>) -> Result<Reconfigured, Refusal> {
        let mut by_address: BTreeMap<String, &Spec> = BTreeMap::new();
        for spec in &nodes {
            if let Some(Spec { address, role, group, .. }) = by_address.insert(spec.address.to_string(), spec)
                && (role, group) != (&spec.role, &spec.group)
            {
                let (address, role, group) = (address.clone(), *role, group.clone());
                return Err(Refusal::Differs { address, role, group });
            }
        }
        let mut done = Reconfigured::default();
        // New nodes come first, so that a node that moves from a name's records to an entry does not drain in between.
        for spec in nodes.iter().filter(|spec| !self.nodes.contains(spec)) {
            done.nodes_named += 1;
            self.registry.apply(Event::Reconfigured(spec.clone()))?;
        }
        for spec in self.nodes.iter().filter(|spec| !by_address.contains_key(&spec.address.to_string())) {
            done.nodes_dropped += 1;
            self.registry.apply(Event::Unconfigured(spec.address.clone()))?;
        }
        let (kept, dropped): (Vec<Name>, Vec<Name>) =
            self.names.drain(..).partition(|looked_up| names.contains(&looked_up.name));
        self.names = kept;
        for name in names {
            if !self.names.iter().any(|kept| kept.name == name) {
                done.names_added += 1;
                self.look_up(name);
            }
        }
        for Name { number, look_up, .. } in dropped {
            done.names_dropped += 1;
            look_up.abort();
            let registry = Arc::clone(&self.registry);
            // Applied after the look-up has ended, so that no records of the name follow it.
            self.runtime.spawn(async move {
                let _ = look_up.await;
                let _ = registry.apply(Event::Unnamed(number));
            });
        }
        self.nodes = nodes;
        Ok(done)
    }

    fn look_up(&mut self, name: DnsName) {
        let number = self.next;
        self.next += 1;
        let looking =
            dns::look_up(Arc::clone(&self.registry), Arc::clone(&self.resolver), number, name.clone());
        self.names.push(Name { name, number, look_up: self.runtime.spawn(looking) });
    }
}
