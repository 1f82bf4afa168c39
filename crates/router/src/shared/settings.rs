//! What an operator sets of the proxy.

use std::time::Duration;

use kvlane_door::Names;

use super::keys::Keys;

/// Limits and deadlines.
#[derive(Debug, Clone)]
pub struct ProxySettings {
    /// Threads that serve, each with a runtime of its own.
    pub threads: usize,
    /// Clients' connections at a time, over all threads. A further one takes the slot of one that has sent no whole head, or is
    /// idle.
    pub connections_max: usize,
    /// Clients have to show one of these keys, as `Authorization: Bearer KEY`. Empty: anybody is served.
    pub keys: Keys,
    /// Names that the `Host` header may have, beside addresses and `localhost`. None: any name, because clients need a key.
    pub names: Option<Names>,
    /// Whether clients may send POSTs that change an engine.
    pub allow_admin_paths: bool,
    /// Whether `/decisions` leaves out the members that reveal which prompts others have sent.
    pub quiet_decisions: bool,
    /// Bytes of a request's body.
    pub body_bytes_max: usize,
    /// Bytes that all requests take at a time, each until its answer begins: bodies, and the ranges and hashes of their contents.
    pub bodies_bytes_max: usize,
    /// Classes of requests that are refused while all nodes are overloaded, and when they may be sent again. The class is in the
    /// header `X-Request-Class`; those without are of the class "default".
    pub refuse: Vec<(String, Duration)>,
    /// Longest time for each piece of a client's body. After this time the body also has to come at a minimum rate.
    pub client_timeout: Duration,
    /// How long a connection to a node may take.
    pub connect_timeout: Duration,
    /// How long an answer's first byte may take; none by default, since the first byte of an unstreamed answer is its last.
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
