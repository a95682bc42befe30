// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the pages in headless Chromium: each test has its own storage node, browser, and server.

mod browser;

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use browser::{Browser, ENTER, ESCAPE, TAB};
use p2pmem_recorder::node::{Node, NodeOptions, SessionHandle, SessionOptions};
use p2pmem_recorder::status::{Direction, Limit};
use p2pmem_recorder::store::{Block, ChannelName, LunOptions, StreamOptions};
use p2pmem_recorder::web::{serve, Server, WebOptions};

const TOKEN: &str = "a token of the tests";
const MIB: u64 = 1 << 20;

/// A storage node with two drives, which are folders.
struct Bed {
    folder: tempfile::TempDir,
    node: Arc<Node>,
    server: Server,
}

impl Bed {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let drives = ["nvme0", "nvme1"].map(|name| folder.path().join(name));
        for drive in &drives {
            std::fs::create_dir(drive).unwrap();
        }
        let mut options = NodeOptions::new("storage-1", drives);
        options.cached = true;
        let node = Node::open(options).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = serve(Arc::clone(&node), listener, &WebOptions::new(TOKEN)).unwrap();
        Self { folder, node, server }
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.server.address())
    }

    fn drive(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Creates the LUN `fast` with the stream `radar`.
    fn create_lun(&self) {
        let lun = LunOptions::new(["nvme0", "nvme1"].map(|name| self.drive(name)))
            .segment_size(MIB)
            .segments(4);
        self.node.create_lun("fast", &lun).unwrap();
        let stream = StreamOptions::new(64 << 10).channels(2);
        self.node.create_stream("fast", "radar", &stream).unwrap();
    }

    /// Records some blocks on a channel.
    fn record(&self, channel: u32) {
        let channel = ChannelName::new("fast", "radar", channel);
        let mut writer = self.node.store().writer(&channel, 1_700_000_000_000_000_000).unwrap();
        for sequence in 0..3 {
            let block = Block {
                sequence,
                time: 1_700_000_000_000_000_000 + sequence,
                checksum: 0,
            };
            writer.write(block, |_, _| Ok::<_, std::io::Error>(())).unwrap();
        }
        assert_eq!(writer.commit().acknowledged.len(), 3);
    }

    fn begin(&self, direction: Direction, channel: u32) -> SessionHandle {
        self.node.begin_session(SessionOptions {
            direction,
            channel: ChannelName::new("fast", "radar", channel),
            recording: 0,
            peer: "accelerators-1".into(),
            nic: "mlx5_0".into(),
            memory: "0000:04:00.0, 1 switch from mlx5_0".into(),
            block_size: MIB,
            buffers: 16,
        })
    }

    /// Opens a browser and logs in.
    async fn browser(&self) -> Browser {
        let browser = Browser::start().await;
        browser.goto(&self.url("/")).await;
        log_in(&browser, TOKEN).await;
        browser
            .wait("document.querySelector('#connection')?.textContent === 'Live'")
            .await;
        browser
    }
}

async fn log_in(browser: &Browser, token: &str) {
    browser.focus_by_tab("#token").await;
    browser.press(token).await;
    browser.press(ENTER).await;
}

/// Returns a condition: an element has a text.
fn has(selector: &str, text: &str) -> String {
    format!("document.querySelector({selector:?})?.textContent.includes({text:?})")
}

fn gone(selector: &str) -> String {
    format!("!document.querySelector({selector:?})")
}

#[tokio::test]
async fn login_needs_the_token() {
    let bed = Bed::new();
    let browser = Browser::start().await;
    browser.goto(&bed.url("/")).await;
    browser.wait("location.pathname === '/login'").await;
    assert!(
        browser.is("document.activeElement.matches('#token')").await,
        "the field has the focus"
    );
    browser.press("a wrong token").await;
    browser.press(ENTER).await;
    browser.wait(&has("[role=alert]", "the token is wrong")).await;
    assert_eq!(browser.violations().await, "", "page of the login");
    log_in(&browser, TOKEN).await;
    browser.wait(&has("h1", "storage-1")).await;
    assert!(
        !browser.is("document.cookie.includes('login')").await,
        "scripts cannot read the cookie"
    );
    browser.focus_by_tab("form[action='/logout'] button").await;
    browser.press(ENTER).await;
    browser.wait("location.pathname === '/login'").await;
    browser.goto(&bed.url("/")).await;
    browser.wait("location.pathname === '/login'").await;
    browser.close().await;
}

#[tokio::test]
async fn luns_and_streams_are_managed_with_the_keyboard() {
    let bed = Bed::new();
    let browser = bed.browser().await;
    browser.wait("!document.querySelector('#no-lun').hidden").await;

    browser.focus_by_tab("#new-lun > summary").await;
    browser.press(ENTER).await;
    browser.focus_by_tab("#lun-name").await;
    browser.press("fast").await;
    // Both drives are selected: the second is not needed.
    let second = format!("input[value={:?}]", bed.drive("nvme1"));
    browser.focus_by_tab(&second).await;
    browser.press(" ").await;
    browser.focus_by_tab("#lun-segment").await;
    browser.replace("2").await;
    browser.focus_by_tab("#lun-segments").await;
    browser.replace("3").await;
    browser.wait(&has("#lun-size", "6 MiB in all")).await;
    browser.press(ENTER).await;
    browser.wait(&has("[data-lun=fast]", "6 MiB of 6 MiB free")).await;
    let lun = bed.node.store().lun("fast").unwrap();
    assert_eq!(lun.drives.len(), 1);
    assert_eq!((lun.segment_size, lun.segments), (2 * MIB, 3));
    browser.wait(&has("#announcement", "fast is being created")).await;

    // The same name again: the form shows the reason.
    browser.focus_by_tab("#new-lun > summary").await;
    browser.press(ENTER).await;
    browser.focus_by_tab("#lun-name").await;
    browser.press("fast").await;
    browser.press(ENTER).await;
    browser
        .wait(&has("#lun-form [role=alert]", "fast exists; choose another name"))
        .await;

    browser.focus_by_tab("[data-lun=fast] > details > summary").await;
    browser.press(ENTER).await;
    browser.focus_by_tab("[data-lun=fast] [name=name]").await;
    browser.press("radar").await;
    browser.focus_by_tab("[data-lun=fast] [name=channels]").await;
    browser.replace("2").await;
    browser.focus_by_tab("[data-lun=fast] [type=submit]").await;
    browser.press(ENTER).await;
    browser
        .wait(&has("[data-stream='fast/radar']", "2 channels, blocks of 1 MiB"))
        .await;
    let streams = bed.node.store().streams("fast").unwrap();
    assert_eq!((streams[0].block_size, streams[0].channels), (MIB, 2));
    browser.close().await;
}

#[tokio::test]
async fn deleting_asks_for_confirmation() {
    let bed = Bed::new();
    bed.create_lun();
    bed.record(0);
    let browser = bed.browser().await;
    let recordings = "[data-stream='fast/radar'] details";
    browser.wait(&has(recordings, "1 recording")).await;
    browser.focus_by_tab(&format!("{recordings} > summary")).await;
    browser.press(ENTER).await;
    browser.focus_by_tab(&format!("{recordings} button")).await;
    browser.press(ENTER).await;
    browser.wait("document.querySelector('#confirm').open").await;
    assert!(
        browser
            .is(&has("#confirm", "Delete recording 0 of fast/radar/0?"))
            .await
    );
    assert!(
        browser.is("document.activeElement.matches('#confirm-no')").await,
        "Cancel has the focus"
    );
    assert_eq!(browser.violations().await, "", "dialog");
    browser.press(ESCAPE).await;
    browser.wait("!document.querySelector('#confirm').open").await;
    let channel = ChannelName::new("fast", "radar", 0);
    assert_eq!(bed.node.store().recordings(&channel).unwrap().len(), 1);
    assert!(
        browser
            .is(&format!(
                "document.activeElement.matches({:?})",
                format!("{recordings} button")
            ))
            .await
    );

    browser.press(ENTER).await;
    browser.wait("document.querySelector('#confirm').open").await;
    browser.press(ENTER).await;
    browser.wait("!document.querySelector('#confirm').open").await;
    assert_eq!(bed.node.store().recordings(&channel).unwrap().len(), 1, "Enter cancels");

    browser.press(ENTER).await;
    browser.focus_by_tab("#confirm-yes").await;
    browser.press(ENTER).await;
    browser.wait(&has(recordings, "0 recordings")).await;
    // Then the focus is on the heading.
    browser
        .wait(&has("#announcement", "recording 0 of fast/radar/0 was deleted"))
        .await;
    assert_eq!(bed.node.store().recordings(&channel).unwrap().len(), 0);

    // A LUN that is in use stays, and the page says why.
    let writer = bed.node.store().writer(&channel, 0).unwrap();
    browser.focus_by_tab("[data-lun=fast] > .title button").await;
    browser.press(ENTER).await;
    browser.focus_by_tab("#confirm-yes").await;
    browser.press(ENTER).await;
    browser
        .wait(&has("#message", "fast is in use; stop its writers and readers first"))
        .await;
    drop(writer);
    browser.focus_by_tab("[data-lun=fast] > .title button").await;
    browser.press(ENTER).await;
    browser.focus_by_tab("#confirm-yes").await;
    browser.press(ENTER).await;
    browser.wait(&gone("[data-lun=fast]")).await;
    assert!(bed.node.store().luns().is_empty());
    browser.wait("document.activeElement.matches('#luns-title')").await;
    browser.wait("document.querySelector('#message').hidden").await;
    browser.close().await;
}

#[tokio::test]
async fn sessions_show_live_figures_and_stop() {
    let bed = Bed::new();
    bed.create_lun();
    let browser = bed.browser().await;
    browser.wait("!document.querySelector('#no-session').hidden").await;
    let session = bed.begin(Direction::Record, 0);
    session.progress(3, Limit::Peer);
    let card = "[data-session='0']";
    browser.wait(&has(card, "Record fast/radar/0, recording 0")).await;
    browser.wait(&has(card, "The accelerator node limits the rate")).await;
    for text in [
        "accelerators-1",
        "mlx5_0",
        "0000:04:00.0, 1 switch from mlx5_0",
        "3 of 16",
        "0 of 1 MiB",
    ] {
        browser.wait(&has(card, text)).await;
    }

    // Blocks arrive until the page shows a rate.
    let rate = "parseFloat(document.querySelector(\"[data-session='0'] dd\").textContent) > 0";
    browser
        .wait_while(rate, || {
            session.arrived();
            session.acknowledged(1);
        })
        .await;
    session.progress(14, Limit::Drive);
    browser
        .wait(&has(card, "The drives limit the rate: buffers wait for"))
        .await;
    browser.wait(&has(card, "14 of 16")).await;
    assert!(browser.is(&has(&format!("{card} .limit"), "(queue depth ")).await);
    assert!(
        browser
            .is("document.querySelector('#port-chart').ariaLabel.includes('now: mlx5_0 record')")
            .await
    );
    assert!(
        browser
            .is("document.querySelectorAll('.chart canvas').length === 2")
            .await
    );
    assert!(browser.is(&has("#port-list", "mlx5_0")).await);
    assert!(browser.is(&has("#summary", "Dropped blocks0")).await);

    browser.focus_by_tab(&format!("{card} button")).await;
    browser.press(ENTER).await;
    browser.wait(&has("#announcement", "Session 0 is stopping")).await;
    assert!(session.is_stopped());
    // A block that is not durable when the session ends is dropped.
    session.arrived();
    session.failed("the other side did not answer for 30 s");
    drop(session);
    browser.wait(&gone(card)).await;
    browser.wait(&has("[data-ended='0']", "did not answer for 30 s")).await;
    browser.wait(&has("#summary", "Dropped blocks1")).await;
    let problem = "Session 0, Record fast/radar/0: the other side did not answer";
    browser.wait(&has("#problems", problem)).await;
    // The next session of the channel works.
    let _next = bed.begin(Direction::Record, 0);
    browser.wait(&format!("!({})", has("#problems", problem))).await;
    assert!(browser.is(&has("[data-ended='0']", "did not answer for 30 s")).await);
    browser.close().await;
}

#[tokio::test]
async fn an_error_of_a_drive_is_shown_with_its_folder() {
    let bed = Bed::new();
    let browser = bed.browser().await;
    browser.wait("document.querySelector('#problems').hidden").await;
    let folder = bed.drive("nvme1");
    bed.node.drive_failed(&folder, &std::io::Error::from_raw_os_error(5));
    let name = folder.to_str().unwrap();
    browser.wait(&has("#problem-list", name)).await;
    browser.wait(&has("#problem-list", "Input/output error")).await;
    browser.wait(&has("#announcement", "Problem: Drive")).await;
    browser
        .wait(&has(&format!("[data-drive={name:?}]"), "Error: Input/output error"))
        .await;
    let other = bed.drive("nvme0");
    assert!(!browser.is(&has(&format!("[data-drive={other:?}]"), "Error")).await);
    browser.close().await;
}

#[tokio::test]
async fn a_lost_connection_is_shown_and_ends_at_the_login() {
    let bed = Bed::new();
    let browser = bed.browser().await;
    let address = bed.server.address();
    bed.server.stop();
    browser.wait(&has("#connection", "Connection lost")).await;
    // The new server does not know the login of the old one.
    let listener = TcpListener::bind(address).unwrap();
    let server = serve(Arc::clone(&bed.node), listener, &WebOptions::new(TOKEN)).unwrap();
    browser.wait("location.pathname === '/login'").await;
    log_in(&browser, TOKEN).await;
    browser.wait(&has("#connection", "Live")).await;
    browser.close().await;
    drop(server);
}

/// Also makes the pictures `recorder-*.png` in `build/reports`.
#[tokio::test]
async fn pages_fit_and_are_accessible_in_light_and_dark() {
    let bed = Bed::new();
    bed.create_lun();
    bed.record(0);
    bed.record(1);
    let ended = bed.begin(Direction::Play, 1);
    ended.failed("the other side did not answer for 30 s");
    drop(ended);
    let session = bed.begin(Direction::Record, 0);
    session.progress(14, Limit::Drive);
    let browser = bed.browser().await;
    // Three rates make a line in the chart.
    for _ in 0..3 {
        browser
            .run("document.querySelector('#port-chart').removeAttribute('aria-label')")
            .await;
        let shown = "parseFloat(document.querySelector(\"[data-session='1'] dd\").textContent) > 0 && document.querySelector('#port-chart[aria-label] canvas')";
        let work = || {
            for _ in 0..10 {
                session.arrived();
                session.acknowledged(1);
            }
        };
        browser.wait_while(shown, work).await;
    }
    bed.node
        .drive_failed(&bed.drive("nvme1"), &std::io::Error::from_raw_os_error(5));
    browser.wait(&has("#problem-list", "Input/output error")).await;

    let mut pages = Vec::new();
    for (name, width, dark) in [
        ("light", 1200, false),
        ("dark", 1200, true),
        ("phone", 360, false),
        ("phone-dark", 360, true),
    ] {
        browser.appear(width, dark).await;
        // The first picture is as a person finds the page, the check of all parts follows.
        browser.screenshot(name).await;
        browser
            .run("for (const part of document.querySelectorAll('details')) part.open = true")
            .await;
        assert_eq!(
            browser.wider_than_page().await,
            "",
            "{name}: parts are wider than the page"
        );
        assert_eq!(browser.violations().await, "", "{name}");
        browser
            .run("for (const part of document.querySelectorAll('details')) part.open = false")
            .await;
        pages.push(browser.value("getComputedStyle(document.body).backgroundColor").await);
    }
    assert_ne!(pages[0], pages[1]);
    assert_eq!(pages[0], pages[2]);

    let origin = bed.url("/");
    let requests = browser
        .value("performance.getEntriesByType('resource').map((entry) => entry.name)")
        .await;
    let requests = requests.as_array().unwrap();
    assert!(requests.len() >= 4, "{requests:?}");
    for request in requests {
        assert!(request.as_str().unwrap().starts_with(&origin), "{request}");
    }
    assert_eq!(browser.console(), Vec::<String>::new(), "messages of the browser");
    browser.close().await;
}

#[tokio::test]
async fn focus_is_visible_on_every_control() {
    let bed = Bed::new();
    bed.create_lun();
    let _session = bed.begin(Direction::Record, 0);
    let browser = bed.browser().await;
    browser.wait(&has("[data-session='0']", "Record")).await;
    browser.run("document.querySelector('#new-lun').open = true").await;
    let mut seen = 0;
    loop {
        browser.press(TAB).await;
        if !browser
            .is("document.activeElement.matches('a, button, input, select, summary')")
            .await
        {
            break;
        }
        let visible = "(() => { const style = getComputedStyle(document.activeElement); return style.outlineStyle === 'solid' && parseFloat(style.outlineWidth) >= 2 })()";
        let name = browser.value("document.activeElement.outerHTML").await;
        assert!(browser.is(visible).await, "{name}");
        seen += 1;
        assert!(seen < 60, "the focus stays in the page");
    }
    assert!(seen >= 12, "{seen} controls");
    browser.close().await;
}

/// Returns the source of axe-core, which npm installs by `web/package-lock.json`.
fn axe() -> String {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("web");
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("axe");
    let script = folder.join("node_modules/axe-core/axe.min.js");
    std::fs::create_dir_all(&folder).unwrap();
    // Tests run at the same time, and other processes too.
    let lock = std::fs::File::create(folder.join("lock")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let read = |folder: &PathBuf| std::fs::read(folder.join("package-lock.json")).unwrap_or_default();
    if read(&folder) != read(&source) || !script.exists() {
        std::fs::copy(source.join("package.json"), folder.join("package.json")).unwrap();
        let locked = folder.join("package-lock.json");
        std::fs::copy(source.join("package-lock.json"), &locked).unwrap();
        let output = Command::new("npm")
            .args(["ci", "--ignore-scripts", "--prefer-offline", "--no-audit", "--no-fund"])
            .current_dir(&folder)
            .output()
            .expect("npm is missing (Debian: apt-get install npm)");
        if !output.status.success() {
            std::fs::remove_file(&locked).unwrap();
            panic!("npm failed: {}", String::from_utf8_lossy(&output.stderr));
        }
    }
    std::fs::read_to_string(script).unwrap()
}
