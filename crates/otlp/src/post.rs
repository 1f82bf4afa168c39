//! One request to a collector, and what its answer means.

use std::{sync::Arc, time::Duration};

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceResponse;
use prost::Message;
use thiserror::Error;
use ureq::{
    Agent,
    tls::{Certificate, PemItem, RootCerts, TlsConfig, TlsProvider, parse_pem},
};

use crate::{endpoint::Endpoint, settings::Settings};

/// Longest answer that is read.
const ANSWER_BYTES_MAX: u64 = 64 << 10;
/// The collector could not take the request for now: OTLP/HTTP, "Retryable Response Codes".
const RETRYABLE: [u16; 4] = [429, 502, 503, 504];

/// Why a collector did not take a request.
#[derive(Debug, Error)]
pub(crate) enum Refused {
    /// It may take the same request later.
    #[error("{0}")]
    ForNow(String),
    /// It would refuse the same request again.
    #[error("it answered {0}")]
    ForGood(u16),
}

/// Why an exporter cannot start.
#[derive(Debug, Error)]
pub(crate) enum TlsError {
    #[error("--otlp-ca-file has no certificate in PEM")]
    Pem,
    #[error("this host has no authorities that it trusts: name one with --otlp-ca-file")]
    NoAuthorities,
}

/// Sends requests to one collector.
pub(crate) struct Collector {
    agent: Agent,
    endpoint: Endpoint,
    headers: Vec<(String, String)>,
}

impl Collector {
    pub(crate) fn new(settings: &Settings) -> Result<Self, TlsError> {
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            // The settings name the collector; another address is none that the operator chose.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .proxy(None)
            .user_agent(concat!("kvlane/", env!("CARGO_PKG_VERSION")));
        if settings.endpoint.is_secure() {
            config = config.tls_config(tls(settings.authority.as_deref())?);
        }
        let (endpoint, headers) = (settings.endpoint.clone(), settings.headers.clone());
        Ok(Self { agent: config.build().into(), endpoint, headers })
    }

    /// Sends the body. Returns how many items of it the collector rejected.
    pub(crate) fn post(&self, signal: &str, body: &[u8], timeout: Duration) -> Result<u64, Refused> {
        let request = self.agent.post(self.endpoint.of(signal));
        let request = request.config().timeout_global(Some(timeout)).build();
        let mut request = request.header("content-type", "application/x-protobuf");
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        let mut response = request.send(body).map_err(|error| Refused::ForNow(error.to_string()))?;
        match response.status().as_u16() {
            200..=299 => {
                let answer = response.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_to_vec();
                Ok(answer.map_or(0, |answer| rejected(&answer)))
            }
            status if RETRYABLE.contains(&status) => Err(Refused::ForNow(format!("it answered {status}"))),
            status => Err(Refused::ForGood(status)),
        }
    }
}

fn tls(authority: Option<&[u8]>) -> Result<TlsConfig, TlsError> {
    let certificates: Vec<Certificate<'static>> = match authority {
        Some(pem) => {
            let items = parse_pem(pem).filter_map(Result::ok);
            let certificate = |item| match item {
                PemItem::Certificate(certificate) => Some(certificate),
                _ => None,
            };
            Some(items.filter_map(certificate).collect())
                .filter(|all: &Vec<_>| !all.is_empty())
                .ok_or(TlsError::Pem)?
        }
        None => {
            let found = rustls_native_certs::load_native_certs().certs;
            let all: Vec<_> = found.iter().map(|each| Certificate::from_der(each).to_owned()).collect();
            Some(all).filter(|all| !all.is_empty()).ok_or(TlsError::NoAuthorities)?
        }
    };
    Ok(TlsConfig::builder()
        .provider(TlsProvider::Rustls)
        .root_certs(RootCerts::Specific(Arc::new(certificates)))
        .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .build())
}

/// The number of spans, or of values, that an answer rejects. 0 for bytes that are no answer. The answers for spans and for
/// metrics have the same form.
pub fn rejected(answer: &[u8]) -> u64 {
    let partial = ExportTraceServiceResponse::decode(answer).ok().and_then(|answer| answer.partial_success);
    partial.map_or(0, |partial| u64::try_from(partial.rejected_spans).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use opentelemetry_proto::tonic::collector::trace::v1::ExportTracePartialSuccess;

    use super::*;

    #[test]
    fn an_answer_may_reject_a_part() {
        let answer = |rejected_spans| {
            let partial = ExportTracePartialSuccess { rejected_spans, error_message: "why".into() };
            ExportTraceServiceResponse { partial_success: Some(partial) }.encode_to_vec()
        };
        assert_eq!(
            [rejected(&answer(3)), rejected(&answer(-1)), rejected(b""), rejected(b"\xff")],
            [3, 0, 0, 0]
        );
    }
}
