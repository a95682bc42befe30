// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the command: what stops it before it serves.

use std::os::unix::fs::PermissionsExt;

use assert_cmd::Command;

/// Returns the one line that the command ends with.
fn refusal(arguments: &[&str]) -> String {
    let output = Command::cargo_bin("p2pmem-perf")
        .unwrap()
        .arg("gauge")
        .args(arguments)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    text
}

#[test]
fn a_token_that_cannot_be_used_is_refused_with_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("token");
    let file = path.to_str().unwrap();
    let arguments = ["--server", "b", "--token-file", file];
    let missing = refusal(&arguments);
    assert!(
        missing.contains("cannot read the token in") && missing.contains("check"),
        "{missing}"
    );
    std::fs::write(&path, "short").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    assert!(refusal(&arguments).contains("openssl rand -hex 32"));
    std::fs::write(&path, "0123456789abcdef").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    assert!(refusal(&arguments).contains("chmod 600"));
}

#[test]
fn a_server_without_a_host_is_an_invalid_argument() {
    for server in ["", ":18520", "b:0"] {
        let output = Command::cargo_bin("p2pmem-perf")
            .unwrap()
            .args(["gauge", "--server", server])
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{server}");
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains("HOST"), "{text}");
    }
}
