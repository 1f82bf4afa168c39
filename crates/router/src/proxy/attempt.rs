//! One request, from the choice of its nodes to the first byte of its answer.

use std::{
    cell::Cell,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{
    Response, StatusCode,
    body::Incoming,
    header::HeaderValue,
    http::{request, response},
};
use tokio::time::timeout;

use super::{
    answer::{AnswerBody, EngineBody, Problem},
    forward,
    leg::LegGuard,
    shared::{Counters, Shared},
    upstream::{Lent, UpstreamError, Upstreams},
};
use crate::{
    body::{Mark, Scan, scan},
    decisions::Decision,
    ids::RequestId,
    legs,
    schedule::{Chosen, Leg, LegEnd, NoNode, NodeId, Request, Reservation, Why},
};

/// Nodes that one request is tried on.
const ATTEMPTS_MAX: usize = 16;
/// Of them, nodes that may fail after they took the request: it may be the request that kills engines.
const TAKEN_MAX: u32 = 3;
/// Here vLLM takes a request's id out of its body.
const RESPONSES: &str = "/v1/responses";
/// Longest answer of a prefill node, or of one that refuses.
const SHORT_ANSWER_BYTES_MAX: usize = 16 << 20;

/// A client's request.
pub(super) struct Work<'a> {
    pub(super) shared: &'a Arc<Shared>,
    pub(super) upstreams: &'a Upstreams,
    pub(super) head: &'a request::Parts,
    pub(super) body: &'a Bytes,
    /// None where the body is no JSON.
    pub(super) scan: Option<&'a Scan<'a>>,
    /// None where the request names none.
    pub(super) model: Option<&'a str>,
    pub(super) marks: &'a [Mark],
    pub(super) id: RequestId,
    /// What the client knows the request by.
    pub(super) client_id: &'a HeaderValue,
    /// It cannot be split.
    pub(super) one_node: bool,
    /// Nodes that have failed after they took it.
    pub(super) taken: Cell<u32>,
}

/// A node failed a request before its first byte: another one may serve it.
struct Failed {
    node: Option<NodeId>,
    /// What the client gets if there is no other one.
    answer: Response<AnswerBody>,
    /// Since the deadline for the first byte had passed.
    is_late: bool,
}

/// An answer whose head has come.
struct Begun {
    head: response::Parts,
    body: Incoming,
    lent: Lent,
    guard: LegGuard,
}

impl Work<'_> {
    /// Serves it, whoever can.
    pub(super) async fn serve(&self) -> Response<AnswerBody> {
        let mut tried = Vec::new();
        let mut last: Option<Failed> = None;
        for attempt in 0..ATTEMPTS_MAX as u32 {
            let chosen = match self.choose(&tried, attempt) {
                Ok(chosen) => chosen,
                Err(none) => {
                    Counters::count(&self.shared.counters.refused);
                    return last.map_or_else(|| no_node(&none).answer(), |failed| failed.answer);
                }
            };
            if last.is_some() {
                Counters::count(&self.shared.counters.retries);
            }
            let served = match chosen {
                Chosen::One(whole) => self.whole(whole, attempt).await,
                Chosen::Pair { prefill, decode } => self.pair(prefill, decode, attempt, &tried).await,
            };
            let failed = match served {
                Ok(answer) => return answer,
                Err(failed) => failed,
            };
            tried.extend(failed.node);
            // A slow node may be slow for the request: two are enough.
            if failed.is_late && last.as_ref().is_some_and(|last| last.is_late) {
                return failed.answer;
            }
            if self.taken.get() >= TAKEN_MAX {
                return failed.answer;
            }
            last = Some(failed);
        }
        last.map_or_else(
            || Problem::new(StatusCode::BAD_GATEWAY, "no node answered").answer(),
            |failed| failed.answer,
        )
    }

    fn choose(&self, tried: &[NodeId], attempt: u32) -> Result<Chosen, NoNode> {
        let request = self.request(tried);
        let mut state = self.shared.state.lock();
        let choice = state.scheduler.choose(&request, Instant::now())?;
        let (prefill, node) = match &choice.chosen {
            Chosen::One(one) => (None, one.node),
            Chosen::Pair { prefill, decode } => (Some(prefill.node), decode.node),
        };
        let name = |id| state.scheduler.node(id).map(|node| Arc::clone(&node.name));
        let decision = Decision {
            at: SystemTime::now(),
            id: self.id,
            client_id: String::from_utf8_lossy(self.client_id.as_bytes()).into_owned(),
            model: self.model.map(str::to_owned),
            attempt,
            prefill: prefill.and_then(name),
            node: name(node).unwrap_or_else(|| "".into()),
            why: choice.why,
            prompt_tokens: choice.prompt_tokens,
            cached_tokens: choice.cached_tokens,
            candidates: choice.candidates,
        };
        if choice.why == Why::OtherRole && Counters::count(&self.shared.counters.other_role) {
            tracing::warn!(
                id = self.id.name(),
                node = %decision.node,
                "no node of the right role is left: one of another role serves. Further cases are only counted"
            );
        }
        tracing::debug!(?decision, "chosen");
        state.decisions.push(decision);
        Ok(choice.chosen)
    }

    fn request<'r>(&'r self, tried: &'r [NodeId]) -> Request<'r> {
        Request { model: self.model, marks: self.marks, one_node: self.one_node, tried }
    }

    async fn whole(&self, whole: Reservation, attempt: u32) -> Result<Response<AnswerBody>, Failed> {
        let begun = self.send(whole, self.body.clone(), attempt).await?;
        self.pass_on(begun).await
    }

    async fn pair(
        &self,
        prefill: Reservation,
        decode: Reservation,
        attempt: u32,
        tried: &[NodeId],
    ) -> Result<Response<AnswerBody>, Failed> {
        let mut decode_guard = LegGuard::new(self.shared, decode);
        let handed_over = match self.prefill(prefill, attempt).await {
            Ok(Ok(handed_over)) => handed_over,
            Ok(Err(refused)) => {
                decode_guard.end(LegEnd::Left);
                return Ok(refused);
            }
            Err(failed) => {
                decode_guard.end(LegEnd::Left);
                return Err(failed);
            }
        };
        let Handed { body, prefill_node } = handed_over;
        let mut tried = tried.to_vec();
        let mut attempt = attempt;
        loop {
            let failed = match self.send_guarded(decode_guard, Leg::Decode, body.clone(), attempt).await {
                Ok(begun) => match self.pass_on(begun).await {
                    Ok(answer) => return Ok(answer),
                    Err(failed) => failed,
                },
                Err(failed) => failed,
            };
            tried.extend(failed.node);
            if failed.is_late || self.taken.get() >= TAKEN_MAX || tried.len() >= ATTEMPTS_MAX {
                return Err(failed);
            }
            let request = self.request(&tried);
            let again =
                self.shared.state.lock().scheduler.choose_decode(&request, prefill_node, Instant::now());
            let Some(again) = again else { return Err(failed) };
            Counters::count(&self.shared.counters.retries);
            attempt += 1;
            decode_guard = LegGuard::new(self.shared, again);
        }
    }

    /// The prefill leg. Answers what the decode node gets, or the prefill node's refusal of the request itself.
    async fn prefill(
        &self,
        prefill: Reservation,
        attempt: u32,
    ) -> Result<Result<Handed, Response<AnswerBody>>, Failed> {
        let prefill_node = prefill.node;
        let body = self.scan.map_or_else(|| self.body.clone(), |scan| legs::prefill(scan).into());
        let Begun { head, body, lent, mut guard } = self.send(prefill, body, attempt).await?;
        let collected = Limited::new(body, SHORT_ANSWER_BYTES_MAX).collect().await;
        let answer = match collected {
            Ok(collected) => collected.to_bytes(),
            Err(error) => {
                guard.end(LegEnd::Failed);
                let sentence = format!("a prefill node ended its answer before its end: {error}");
                return Err(self.taken(Failed::bad_gateway(Some(prefill_node), sentence)));
            }
        };
        lent.give_back();
        guard.prefilled(self.marks);
        guard.end(LegEnd::Served);
        if !head.status.is_success() {
            return Ok(Err(self.own(head, answer)));
        }
        let handed_over = scan(&answer).ok();
        let transfer = handed_over.as_ref().and_then(legs::handed_over);
        let body = match (self.scan, transfer.and_then(|transfer| std::str::from_utf8(transfer).ok())) {
            (Some(scan), Some(transfer)) => legs::decode(scan, transfer).into(),
            _ => {
                if Counters::count(&self.shared.counters.not_handed_over) {
                    tracing::warn!(
                        id = self.id.name(),
                        "a prefill node handed nothing over: the decode node computes the prompt again. Its connector must \
                         answer kv_transfer_params; further cases are only counted"
                    );
                }
                self.body.clone()
            }
        };
        Ok(Ok(Handed { body, prefill_node }))
    }

    async fn send(&self, reservation: Reservation, body: Bytes, attempt: u32) -> Result<Begun, Failed> {
        let leg = reservation.leg;
        self.send_guarded(LegGuard::new(self.shared, reservation), leg, body, attempt).await
    }

    /// Sends a leg and waits for the head of its answer. A node that says that it cannot is a failure, as one that says nothing.
    async fn send_guarded(
        &self,
        mut guard: LegGuard,
        leg: Leg,
        body: Bytes,
        attempt: u32,
    ) -> Result<Begun, Failed> {
        let node = guard.node();
        let address = node.and_then(|node| self.shared.state.lock().addresses.get(&node).cloned());
        let Some(address) = address else {
            guard.end(LegEnd::Left);
            return Err(Failed::bad_gateway(node, "the chosen node has just been removed".into()));
        };
        let id = self.id.of_leg(leg, attempt);
        let body = match self.scan {
            Some(scan) if self.head.uri.path() == RESPONSES => legs::response(scan, &id).into(),
            _ => body,
        };
        let settings = &self.shared.settings;
        let request = || forward::to_engine(self.head, &address, leg, &id, body.clone());
        let sending = self.upstreams.send(&address, request, settings.connect_timeout);
        let sent = match settings.first_byte_timeout {
            None => Ok(sending.await),
            Some(deadline) => timeout(deadline, sending).await.map_err(|_| deadline),
        };
        let (response, lent) = match sent {
            Ok(Ok(sent)) => sent,
            Ok(Err(error)) => {
                guard.end(LegEnd::Failed);
                tracing::debug!(id, node = %address, %error, "a node failed a request");
                let failed = Failed::bad_gateway(node, format!("the node at {address} failed: {error}"));
                let was_taken = matches!(error, UpstreamError::Ended(_));
                return Err(if was_taken { self.taken(failed) } else { failed });
            }
            Err(deadline) => {
                guard.end(LegEnd::Failed);
                return Err(Failed::late(node, deadline));
            }
        };
        let (head, body) = response.into_parts();
        if !is_of_the_node(head.status) {
            return Ok(Begun { head, body, lent, guard });
        }
        // It lives, but has too much to do: no reason to leave it alone for a while.
        let is_busy = head.status == StatusCode::TOO_MANY_REQUESTS;
        guard.end(if is_busy { LegEnd::Left } else { LegEnd::Failed });
        let answer = match Limited::new(body, SHORT_ANSWER_BYTES_MAX).collect().await {
            Ok(collected) => {
                lent.give_back();
                self.own(head, collected.to_bytes())
            }
            Err(error) => {
                Problem::new(StatusCode::BAD_GATEWAY, format!("the node at {address} failed: {error}"))
                    .answer()
            }
        };
        Err(Failed { node, answer, is_late: false })
    }

    /// A node has failed after it took the request.
    fn taken(&self, failed: Failed) -> Failed {
        self.taken.set(self.taken.get() + 1);
        failed
    }

    /// The engine's answer to the client, once its first byte is there.
    async fn pass_on(&self, begun: Begun) -> Result<Response<AnswerBody>, Failed> {
        let Begun { head, mut body, lent, mut guard } = begun;
        let node = guard.node();
        let first = match self.shared.settings.first_byte_timeout {
            None => Ok(body.frame().await),
            Some(deadline) => timeout(deadline, body.frame()).await.map_err(|_| deadline),
        };
        let body = match first {
            Ok(Some(Ok(first))) => EngineBody::new(first, body, lent, guard, self.marks),
            Ok(None) => EngineBody::empty(lent, guard),
            Ok(Some(Err(error))) => {
                guard.end(LegEnd::Failed);
                let sentence = format!("a node ended its answer before the first byte: {error}");
                return Err(self.taken(Failed::bad_gateway(node, sentence)));
            }
            Err(deadline) => {
                guard.end(LegEnd::Failed);
                return Err(Failed::late(node, deadline));
            }
        };
        let mut response = Response::from_parts(head, AnswerBody::Engine(Box::new(body)));
        forward::to_client(&mut response, self.client_id);
        Ok(response)
    }

    /// An engine's answer that was read already.
    fn own(&self, head: response::Parts, body: Bytes) -> Response<AnswerBody> {
        let mut response = Response::from_parts(head, AnswerBody::Own(Full::new(body)));
        forward::to_client(&mut response, self.client_id);
        response
    }
}

/// What the decode leg says, and who has prefilled.
struct Handed {
    body: Bytes,
    prefill_node: NodeId,
}

impl Failed {
    fn bad_gateway(node: Option<NodeId>, sentence: String) -> Self {
        Self { node, answer: Problem::new(StatusCode::BAD_GATEWAY, sentence).answer(), is_late: false }
    }

    fn late(node: Option<NodeId>, deadline: Duration) -> Self {
        let sentence = format!("no node answered within {} s", deadline.as_secs_f64());
        Self { node, answer: Problem::new(StatusCode::GATEWAY_TIMEOUT, sentence).answer(), is_late: true }
    }
}

/// Whether this answer says something of the node, and not of the request: another node may do better.
fn is_of_the_node(status: StatusCode) -> bool {
    status.is_server_error() && status != StatusCode::NOT_IMPLEMENTED
        || status == StatusCode::TOO_MANY_REQUESTS
}

fn no_node(none: &NoNode) -> Problem {
    match none {
        NoNode::UnknownModel { .. } => {
            Problem::new(StatusCode::NOT_FOUND, none.to_string()).with_param("model")
        }
        NoNode::NoneLeft { retry_after, .. } => Problem {
            retry_after: Some(*retry_after),
            ..Problem::new(StatusCode::SERVICE_UNAVAILABLE, none.to_string())
        },
    }
}
