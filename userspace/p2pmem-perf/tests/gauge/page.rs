// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the page in headless Chromium.

use std::time::Duration;

use serde_json::{json, Value};

use crate::browser::{has, Browser, ENTER, ESCAPE};
use crate::{Bed, TOKEN};

impl Bed {
    /// Opens a browser and logs in.
    async fn browser(&self) -> Browser {
        Browser::start_logged_in(&self.url("/"), TOKEN).await
    }

    /// Starts a measurement as a program does.
    fn begin(&self, path: &str, body: &Value) {
        let reply = self.call("POST", path, &body.to_string());
        assert_eq!(reply.status, 202, "{reply:?}");
    }

    fn begin_run(&self, memory: &str, peer: &str, messages: u64) {
        let body = json!({
            "memory": memory, "peer_memory": peer, "mode": "write", "size": "2M", "messages": messages,
            "nics": ["mlx5_0", "mlx5_1"],
        });
        self.begin("/api/run", &body);
    }

    fn begin_matrix(&self, memory: &[&str], modes: &[&str], staged: bool) {
        let body = json!({
            "memory": memory, "peer_memory": memory, "modes": modes, "size": "1M", "messages": 200,
            "nics": ["mlx5_0", "mlx5_1"], "staged": staged,
        });
        self.begin("/api/matrix", &body);
    }
}

const ENDLESS: u64 = 10_000_000;

/// Returns a condition: the number at the beginning of an element's text is not zero.
fn positive(selector: &str) -> String {
    format!("parseFloat(document.querySelector({selector:?})?.textContent) > 0")
}

const NOW: &str = "[data-name='accelerator → cpu'] td";

#[tokio::test]
async fn login_needs_the_token() {
    let bed = Bed::new();
    let browser = Browser::start().await;
    browser.goto(&bed.url("/")).await;
    browser.wait("location.pathname === '/login'").await;
    assert!(browser.is(&has("h1", "p2pmem gauge")).await);
    browser.press("a wrong token of 16").await;
    browser.press(ENTER).await;
    browser.wait(&has("[role=alert]", "the token is wrong")).await;
    assert_eq!(browser.violations().await, "");
    browser.log_in(TOKEN).await;
    browser.wait(&has("h1", "node-b:18520")).await;
    browser.focus_by_tab("form[action='/logout'] button").await;
    browser.press(ENTER).await;
    browser.wait("location.pathname === '/login'").await;
    browser.close().await;
}

#[tokio::test]
async fn a_run_is_started_watched_and_stopped_with_the_keyboard() {
    let bed = Bed::new();
    let browser = bed.browser().await;
    browser.wait("!document.querySelector('#no-job').hidden").await;
    // The selection of a list follows the keys.
    browser.focus_by_tab("#run-memory").await;
    browser.press("acc").await;
    browser.focus_by_tab("#run-peer").await;
    browser.press("cpu").await;
    browser.focus_by_tab("#run-messages").await;
    browser.replace("10000000").await;
    browser.focus_by_tab("#run-size").await;
    browser.replace("0").await;
    browser.press(ENTER).await;
    browser.wait(&has("#run-form [role=alert]", "specify")).await;
    browser.focus_by_tab("#run-size").await;
    browser.replace("2M").await;
    browser.press(ENTER).await;
    browser.wait(&has("#job-name", "Run 1: accelerator → cpu, write")).await;
    browser.wait(&has("#announcement", "The run starts")).await;
    browser.wait(&positive(NOW)).await;
    browser.wait(&positive("[data-name=mlx5_0] td")).await;
    browser
        .wait(&has("#job-count", "of 10,000,000 messages of 2 MiB"))
        .await;
    browser.wait(&has("#summary", "Run")).await;
    let charts = "document.querySelectorAll('.chart canvas').length === 2";
    assert!(browser.is(charts).await);
    let label = "document.querySelector('#port-chart').ariaLabel.startsWith('Rate of each port in MiB/s')";
    assert!(browser.is(label).await);

    // The second run is refused, and the first one goes on.
    browser.focus_by_tab("#run-size").await;
    browser.press(ENTER).await;
    browser
        .wait(&has(
            "#run-form [role=alert]",
            "run 1 (accelerator → cpu, write) of the viewer at 127.0.0.1",
        ))
        .await;
    assert!(browser.is(&has("#job-name", "Run 1")).await);

    browser.focus_by_tab("#stop").await;
    browser.press(ENTER).await;
    browser.wait(&has("#announcement", "Measurement 1 ")).await;
    browser
        .wait(&has("[data-result='1']", "stopped by the viewer at 127.0.0.1"))
        .await;
    browser.wait("!document.querySelector('#no-job').hidden").await;
    assert!(browser.is("document.activeElement.matches('#job-title')").await);

    // A run of several sizes has a row for each.
    browser.focus_by_tab("#run-messages").await;
    browser.replace("1").await;
    browser.focus_by_tab("#run-size").await;
    browser.replace("4K,64K").await;
    browser.press(ENTER).await;
    browser
        .wait("document.querySelectorAll(\"[data-result='2']\").length === 2")
        .await;
    assert!(browser.is(&has("[data-result='2']", "complete")).await);
    assert!(browser.is(&has("[data-result='2']", "4 KiB")).await);
    browser.close().await;
}

#[tokio::test]
async fn nothing_is_lost_when_one_of_two_viewers_closes_in_the_middle_of_a_run() {
    let bed = Bed::new();
    let first = bed.browser().await;
    let second = bed.browser().await;
    bed.begin_run("accelerator", "cpu", ENDLESS);
    first.wait(&positive(NOW)).await;
    second.wait(&positive(NOW)).await;
    first.close().await;
    // The rates continue for the other viewer.
    second
        .run("document.querySelector('#pair-chart').removeAttribute('aria-label')")
        .await;
    second
        .wait("document.querySelector('#pair-chart[aria-label] canvas')")
        .await;
    assert!(second.is(&has("#job-name", "Run 1")).await);
    // A new viewer has the rates of the time before it came.
    let third = bed.browser().await;
    third.wait(&positive(NOW)).await;
    third.wait(&positive("[data-name=mlx5_1] td + td")).await;
    third.focus_by_tab("#stop").await;
    third.press(ENTER).await;
    second
        .wait(&has("[data-result='1']", "stopped by the viewer at 127.0.0.1"))
        .await;
    third.close().await;
    second.close().await;
}

#[tokio::test]
async fn the_heat_map_fills_while_a_matrix_is_measured() {
    let bed = Bed::new();
    bed.script.release(0);
    let browser = bed.browser().await;
    browser.wait("!document.querySelector('#no-matrix').hidden").await;
    browser.focus_by_tab("#matrix-form input[value=fpga]").await;
    browser.press(" ").await;
    browser.focus_by_tab("#matrix-form input[value=pageless]").await;
    browser.press(" ").await;
    browser.focus_by_tab("#matrix-sizes").await;
    browser.replace("64K,1M").await;
    browser.press(ENTER).await;
    let cell = |pair: &str| format!("[data-pair='{pair}']");
    let first = cell("write cpu cpu");
    browser.wait(&has(&first, "is being measured")).await;
    assert!(
        browser
            .is(&format!("document.querySelector({first:?}).matches('.now')"))
            .await
    );
    assert!(browser.is(&has(&cell("read cmb cmb"), "not measured")).await);
    assert!(browser.is(&has("#job-count", "0 of 48 pairs")).await);
    bed.script.release(2);
    browser.wait(&has(&first, "1.00")).await;
    browser.wait(&has(&cell("write cpu accelerator"), "0.97")).await;
    browser.wait(&has(&cell("write cpu cmb"), "is being measured")).await;
    let heat = |pair: &str| {
        format!(
            "parseFloat(document.querySelector({:?}).style.getPropertyValue('--heat'))",
            cell(pair)
        )
    };
    assert_eq!(browser.value(&heat("write cpu cpu")).await, json!(45));
    assert_eq!(browser.value(&heat("write cpu cmb")).await, json!(0));
    assert!(
        browser.is("!document.querySelector('#heat .wrong')").await,
        "no byte is wrong"
    );
    bed.script.release(2);
    browser.wait(&has(&cell("write cpu pageless"), "not possible")).await;
    browser
        .wait(&has(
            "#matrix-reasons",
            "cpu → pageless (write): the other side failed: no provider",
        ))
        .await;

    // The other size has the same pairs.
    browser.focus_by_tab("#matrix-size").await;
    browser.press("of 1").await;
    browser.wait(&has("#matrix-about", "messages of 1 MiB")).await;
    assert!(browser.is(&has(&first, "1.00")).await);

    browser.focus_by_tab("#stop").await;
    browser.press(ENTER).await;
    browser
        .wait(&has("#matrix-error", "stopped by the viewer at 127.0.0.1"))
        .await;
    assert!(browser.is(&has(&first, "1.00")).await, "the cells stay");
    bed.script.release(1000);
    bed.begin_matrix(&["cpu", "cmb"], &["write", "send"], false);
    browser.wait(&has("#matrix-about", "Matrix 2 is complete")).await;
    assert!(browser.is(&has(&cell("send cmb cmb"), "0.60")).await);
    assert!(browser.is("document.querySelector('#matrix-error').hidden").await);
    assert!(browser.is("document.querySelectorAll('#heat td').length === 8").await);
    browser.close().await;
}

#[tokio::test]
async fn results_are_downloaded_as_csv_and_json() {
    let bed = Bed::new();
    bed.begin_run("accelerator", "cpu", 1);
    let browser = bed.browser().await;
    browser.wait("document.querySelector(\"[data-result='1']\")").await;
    let content = |kind: &str| {
        format!(
            "(async () => {{ const link = document.querySelector('a[href$={kind}]'); const answer = await fetch(link.href); return [link.matches('[download]'), answer.headers.get('content-disposition'), await answer.text()] }})()"
        )
    };
    let csv = browser.value(&content("csv")).await;
    assert_eq!(csv[0], true);
    assert!(csv[1].as_str().unwrap().contains("p2pmem-gauge.csv"), "{csv}");
    assert!(
        csv[2]
            .as_str()
            .unwrap()
            .contains("run,1,accelerator,cpu,write,mlx5_0,2097152,1,"),
        "{csv}"
    );
    let all = browser.value(&content("json")).await;
    let all: Value = serde_json::from_str(all[2].as_str().unwrap()).unwrap();
    assert_eq!(all["runs"][0]["id"], 1);
    browser.close().await;
}

#[tokio::test]
async fn pages_fit_and_are_accessible_in_light_and_dark() {
    let bed = Bed::new();
    bed.begin_matrix(
        &["cpu", "accelerator", "cmb", "fpga", "pageless"],
        &["write", "read", "send"],
        true,
    );
    let browser = bed.browser().await;
    browser.wait(&has("#matrix-about", "is complete")).await;
    bed.script.fail("the other side ended the connection: see its output");
    bed.begin_run("cmb", "fpga", 1);
    browser.wait(&has("[data-result='2']", "ended the connection")).await;
    bed.begin_run("accelerator", "cpu", ENDLESS);
    browser.wait(&positive(NOW)).await;
    browser
        .run("document.querySelector('#run-form .message').hidden = false; document.querySelector('#run-form .message').textContent = 'x'.repeat(90)")
        .await;
    let mut pages = Vec::new();
    for (name, width, dark) in [
        ("light", 1200, false),
        ("dark", 1200, true),
        ("phone", 360, false),
        ("phone-dark", 360, true),
        ("small", 320, false),
    ] {
        browser.appear(width, dark).await;
        browser.check_appearance(name).await;
        pages.push(browser.value("getComputedStyle(document.body).backgroundColor").await);
    }
    assert_ne!(pages[0], pages[1]);
    assert_eq!(pages[0], pages[2]);
    browser.check_origin(&bed.url("/")).await;
    browser.close().await;
}

#[tokio::test]
async fn focus_is_visible_on_every_control() {
    let bed = Bed::new();
    bed.begin_run("cpu", "cpu", 1);
    let browser = bed.browser().await;
    browser.wait("document.querySelector(\"[data-result='1']\")").await;
    bed.begin_run("accelerator", "cpu", ENDLESS);
    browser.wait(&positive(NOW)).await;
    browser.press(ESCAPE).await;
    let seen = browser
        .focus_every_control("a, button, input, select, #results", 80)
        .await;
    assert!(seen >= 25, "{seen} controls");
    browser.close().await;
}

/// Makes the pictures of the guide, `gauge-*.png`, in `build/reports`. `make gauge-pictures` lets the charts fill:
/// `P2PMEM_PICTURE_SECONDS` is the time that they show.
#[tokio::test]
async fn pictures_show_a_gauge_that_measures() {
    let bed = Bed::new();
    let seconds: u64 = std::env::var("P2PMEM_PICTURE_SECONDS").map_or(4, |text| text.parse().unwrap());
    let browser = bed.browser().await;
    let rate = crate::fake::LINK;
    let messages = |part: f64, share: f64| ((seconds as f64 * part * rate * share) as u64 / (2 << 20)).max(1);
    for (number, (memory, peer, share)) in [("cpu", "cpu", 1.0), ("accelerator", "accelerator", 0.97)]
        .iter()
        .enumerate()
    {
        bed.begin_run(memory, peer, messages(0.2, *share));
        browser
            .wait(&format!("document.querySelector(\"[data-result='{}']\")", number + 1))
            .await;
    }
    // The matrix stops in the last of its four modes.
    bed.script.release(58);
    bed.script.pairs_take(Duration::from_secs(seconds) / 100);
    bed.begin_matrix(&["cpu", "accelerator", "cmb", "fpga"], &["write", "read", "send"], true);
    // One wait has a limit.
    for pairs in [20, 40, 58] {
        let measured = format!(
            "parseInt(document.querySelector('#job-count').textContent.match(/^(\\d+) of 64 pairs/)[1]) >= {pairs}"
        );
        browser.wait(&measured).await;
    }
    browser.wait(&positive("[data-name='cmb → cmb'] td")).await;
    for (name, width, dark) in [("light", 1000, false), ("dark", 1000, true), ("phone", 360, false)] {
        browser.appear(width, dark).await;
        let below = if width > 600 {
            "document.querySelector('[aria-labelledby=start-title]')"
        } else {
            "document.querySelector('[data-mode=read]')"
        };
        browser
            .picture_between(&format!("gauge-{name}"), "document.body", below)
            .await;
    }
    browser.appear(1000, false).await;
    let start = "document.querySelector('[aria-labelledby=start-title]')";
    browser
        .picture_between("gauge-start-light", start, "document.querySelector('footer')")
        .await;
    assert!(browser.is(&has("#job-count", "58 of 64 pairs")).await);
    browser.close().await;
}
