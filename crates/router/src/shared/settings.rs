//! The proxy's limits and deadlines.

use std::time::Duration;

use kvlane_door::Names;

use super::keys::Keys;

/// Set by flags and the file.
#[derive(Debug, Clone)]
pub struct ProxySettings {
    /// Threads that serve clients, each with a runtime of its own.
    pub threads: usize,
    /// Most clients' connections at a time, over all threads. A further one takes the slot of one that has sent no whole head,
    /// or is idle.
    pub connections_max: usize,
    /// Clients have to show one of these keys, as `Authorization: Bearer KEY`. Empty: every client is served.
    pub keys: Keys,
    /// Names that the `Host` header may have, beside addresses and `localhost`. None: any name, because clients need a key.
    pub names: Option<Names>,
    /// Whether clients may send POSTs that change an engine.
    pub allow_admin_paths: bool,
    /// Whether `/decisions` leaves out the members that reveal which prompts others have sent.
    pub quiet_decisions: bool,
    /// Longest body of a request.
    pub body_bytes_max: usize,
    /// Most bytes that all requests take at a time, each until its answer begins: bodies, and the ranges and hashes of their
    /// contents.
    pub bodies_bytes_max: usize,
    /// Classes of requests that are refused while all nodes are overloaded, each with the time to its retry. The header
    /// `X-Request-Class` names a request's class; without it the class is "default".
    pub refuse: Vec<(String, Duration)>,
    /// Longest time for each piece of a client's body. After this time the body also has to come at a minimum rate.
    pub client_timeout: Duration,
    /// Longest time to connect to a node.
    pub connect_timeout: Duration,
    /// Longest time to an answer's first byte. None by default, because an unstreamed answer sends no byte before it is whole.
    pub first_byte_timeout: Option<Duration>,
}

impl Default for ProxySettings {
    fn default() -> Self {
        Self {
            threads: 1,
            connections_max: 10_000,
            keys: Keys::default(),
            names: None,
            allow_admin_paths: false,
            quiet_decisions: false,
            body_bytes_max: 64 << 20,
            bodies_bytes_max: 1 << 30,
            refuse: Vec::new(),
            client_timeout: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(2),
            first_byte_timeout: None,
        }
    }
}
