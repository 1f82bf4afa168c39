//! Certificates for tests, in files.
#![allow(dead_code, unreachable_pub, missing_docs, reason = "tests take what they need")]
#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    date_time_ymd,
};

/// Signs certificates.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

/// A certificate, its key, and the authority, as files.
pub type Files = (PathBuf, PathBuf, PathBuf);

impl Authority {
    pub fn new(name: &str) -> Authority {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Authority { issuer: Issuer::new(params, key), pem }
    }

    /// For servers and clients.
    pub fn files(&self, folder: &Path, name: &str) -> Files {
        let both = [ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        self.files_for(folder, name, &both, 4000)
    }

    /// For these purposes, valid until that year.
    pub fn files_for(
        &self,
        folder: &Path,
        name: &str,
        purposes: &[ExtendedKeyUsagePurpose],
        until: i32,
    ) -> Files {
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.extended_key_usages = purposes.to_vec();
        params.not_after = date_time_ymd(until, 1, 1);
        let key = KeyPair::generate().unwrap();
        let pem = params.signed_by(&key, &self.issuer).unwrap().pem();
        let file = |end: &str, text: &str| {
            let path = folder.join(format!("{name}.{end}.pem"));
            std::fs::write(&path, text).unwrap();
            path
        };
        (file("certificate", &pem), file("key", &key.serialize_pem()), file("authority", &self.pem))
    }
}
