//! Keys and certificates of one control plane.

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose};
use std::path::{Path, PathBuf};

/// The files, all below one folder.
#[derive(Debug)]
pub struct Certificates {
    /// The authority's certificate.
    pub authority: PathBuf,
    /// Certificate of the API server and of the simulated kubelet.
    pub server: PathBuf,
    /// Its key.
    pub server_key: PathBuf,
    /// Key that signs the tokens of service accounts.
    pub accounts_key: PathBuf,
    /// The public half of it.
    pub accounts_public: PathBuf,
}

impl Certificates {
    /// Makes new ones.
    pub fn write(folder: &Path) -> Self {
        let file = |name: &str, text: String| {
            let path = folder.join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "styrmin-test");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();

        let names = ["127.0.0.1", "localhost", "kubernetes.default.svc", "10.64.0.1"].map(str::to_owned);
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(names).unwrap();
        params.distinguished_name.push(DnType::CommonName, "kube-apiserver");
        let server = params.signed_by(&key, &issuer).unwrap();
        let accounts = KeyPair::generate().unwrap();
        Self {
            authority: file("ca.crt", issuer.pem()),
            server: file("server.crt", server.pem()),
            server_key: file("server.key", key.serialize_pem()),
            accounts_key: file("accounts.key", accounts.serialize_pem()),
            accounts_public: file("accounts.pub", accounts.public_key_pem()),
        }
    }
}
