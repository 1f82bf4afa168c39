//! TLS credentials: this process's certificate, and the authority that signs its peers' certificates.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, verify_server_cert_signed_by_trust_anchor};
use rustls::crypto::ring::{cipher_suite, default_provider};
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{
    ClientConfig, DigitallySignedStruct, Error, PeerMisbehaved, RootCertStore, ServerConfig, SignatureScheme,
};
use thiserror::Error;

/// Turns on TLS 1.3 for all connections of an engine. Both sides of each connection show a certificate. Three PEM files.
///
/// A peer's certificate must be signed by the authority, valid now, and meant for its purpose. If it lists purposes
/// (extended key usage), it must list servers and clients, because each process is both. Names and addresses in it are not
/// checked, because peers are found at addresses that change. Any holder of such a certificate gets as far as the greeting,
/// where it has to prove the token. Revocation is not checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tls {
    /// Our certificate, followed by the intermediate ones up to the authority, if any.
    pub certificate: PathBuf,
    /// The private key of that certificate, not encrypted.
    pub key: PathBuf,
    /// The certificates of the authorities that sign peers' certificates.
    pub authority: PathBuf,
}

/// A file of [`Tls`] that cannot be used.
#[derive(Debug, Error)]
#[error("{} cannot be used for TLS: {why}", file.display())]
pub struct TlsError {
    /// The path of the file.
    pub file: PathBuf,
    /// The reason, and how to fix the file.
    pub why: String,
}

/// The two configurations of rustls: a process connects, and listens.
#[derive(Debug, Clone)]
pub(crate) struct Credentials {
    pub(crate) client: Arc<ClientConfig>,
    pub(crate) server: Arc<ServerConfig>,
}

impl Credentials {
    /// Reads and checks the three files.
    pub(crate) fn load(files: &Tls) -> Result<Credentials, TlsError> {
        let Tls { certificate, key, authority } = files;
        let chain = certificates(certificate)?;
        let secret = || {
            PrivateKeyDer::from_pem_file(key)
                .map_err(|error| unusable(key, pem_trouble(error, "a private key that is not encrypted")))
        };
        let mut roots = RootCertStore::empty();
        for root in certificates(authority)? {
            roots
                .add(root)
                .map_err(|error| unusable(authority, format!("{error}; give the authority's own")))?;
        }
        let roots = Arc::new(roots);
        let mut provider = default_provider();
        // Ours comes first if both sides support it: the fastest on processors with AES.
        provider.cipher_suites = vec![
            cipher_suite::TLS13_AES_128_GCM_SHA256,
            cipher_suite::TLS13_AES_256_GCM_SHA384,
            cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
        ];
        let provider = Arc::new(provider);
        let of_authority = |error: &dyn std::fmt::Display| unusable(authority, error.to_string());
        let of_certificate = |error: Error| match error {
            Error::InconsistentKeys(_) => {
                let why = format!("the key in {} is not that of this certificate", key.display());
                unusable(certificate, why)
            }
            error => unusable(certificate, error.to_string()),
        };
        let clients =
            WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider)).build();
        let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| of_authority(&error))?
            .with_client_cert_verifier(clients.map_err(|error| of_authority(&error))?)
            .with_single_cert(chain.clone(), secret()?)
            .map_err(of_certificate)?;
        // Connections are long-lived, so each does a full handshake and no ticket is kept.
        server.send_tls13_tickets = 0;
        let servers = Arc::new(SignedByAuthority { roots, provider: Arc::clone(&provider) });
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| of_authority(&error))?
            .dangerous()
            .with_custom_certificate_verifier(servers)
            .with_client_auth_cert(chain, secret()?)
            .map_err(of_certificate)?;
        client.resumption = Resumption::disabled();
        Ok(Credentials { client: Arc::new(client), server: Arc::new(server) })
    }
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let trouble = |error| unusable(file, pem_trouble(error, "a certificate"));
    let all: Vec<_> = CertificateDer::pem_file_iter(file).and_then(Iterator::collect).map_err(trouble)?;
    match all.is_empty() {
        true => Err(trouble(pem::Error::NoItemsFound)),
        false => Ok(all),
    }
}

fn pem_trouble(error: pem::Error, wanted: &str) -> String {
    match error {
        pem::Error::Io(error) => error.to_string(),
        pem::Error::NoItemsFound => format!("it has to hold {wanted}, as PEM"),
        error => format!("it is not PEM: {error}"),
    }
}

fn unusable(file: &Path, why: String) -> TlsError {
    TlsError { file: file.to_owned(), why }
}

/// Accepts any server certificate that the authority has signed, whatever its name.
#[derive(Debug)]
struct SignedByAuthority {
    roots: Arc<RootCertStore>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for SignedByAuthority {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let certificate = ParsedCertificate::try_from(end_entity)?;
        let algorithms = self.provider.signature_verification_algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&certificate, &self.roots, intermediates, now, algorithms)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        // Cannot happen, because only TLS 1.3 is offered.
        Err(PeerMisbehaved::SelectedTls12UsingTls13VersionExtension.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
