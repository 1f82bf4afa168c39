//! Nodes and names of flags and the file. A reload may change them.

use std::{collections::BTreeMap, fmt, sync::Arc};

use tokio::{runtime::Handle, task::JoinHandle};

use super::{
    dns::{self, DnsName, Resolve},
    event::{Event, Refusal, Spec},
    inner::Inner,
};

/// The configured nodes, and the look-ups of the configured names.
pub(super) struct Configured {
    inner: Arc<Inner>,
    resolver: Arc<dyn Resolve>,
    runtime: Handle,
    nodes: Vec<Spec>,
    names: Vec<Name>,
    /// Number of the next name. No two names share one, so the router can drop late records of a former name.
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
    /// `nodes` have joined already. The look-ups of `names` begin now.
    pub(super) fn start(
        inner: Arc<Inner>,
        resolver: Arc<dyn Resolve>,
        runtime: Handle,
        nodes: Vec<Spec>,
        names: Vec<DnsName>,
    ) -> Self {
        let mut configured = Self { inner, resolver, runtime, nodes, names: Vec::new(), next: 0 };
        names.into_iter().for_each(|name| configured.look_up(name));
        configured
    }

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
        // New nodes come first, so that a node that moves from a name to an entry does not drain in between.
        for spec in nodes.iter().filter(|spec| !self.nodes.contains(spec)) {
            done.nodes_named += 1;
            self.inner.tell(Event::Reconfigured(spec.clone()))?;
        }
        for spec in self.nodes.iter().filter(|spec| !by_address.contains_key(&spec.address.to_string())) {
            done.nodes_dropped += 1;
            self.inner.tell(Event::Unconfigured(spec.address.clone()))?;
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
            let inner = Arc::clone(&self.inner);
            // Sends this after the look-up has ended, so that no records of the name follow.
            self.runtime.spawn(async move {
                let _ = look_up.await;
                let _ = inner.tell(Event::Unnamed(number));
            });
        }
        self.nodes = nodes;
        Ok(done)
    }

    fn look_up(&mut self, name: DnsName) {
        let number = self.next;
        self.next += 1;
        let looking = dns::look_up(Arc::clone(&self.inner), Arc::clone(&self.resolver), number, name.clone());
        self.names.push(Name { name, number, look_up: self.runtime.spawn(looking) });
    }
}
