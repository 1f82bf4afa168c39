//! What flags and the file name, which may change while the router runs.

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
    /// Of the next name: no two names share a number, so that the records of a former one count for nothing.
    next: usize,
}

struct Name {
    name: DnsName,
    number: usize,
    look_up: JoinHandle<()>,
}

/// What a changed configuration did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reconfigured {
    /// Nodes that it names now, or says something else of.
    pub nodes_named: usize,
    /// Nodes that it does not name any more.
    pub nodes_dropped: usize,
    /// The same of names.
    pub names_added: usize,
    /// The same of names.
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
    /// `nodes` have joined already; `names` are looked up from now on.
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
        // What is new comes first: a node that a name had, and that has an entry now, does not drain in between.
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
            // Once the look-up has ended, so that it cannot tell of its records afterwards.
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
