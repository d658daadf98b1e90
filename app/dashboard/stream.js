// The stream of snapshots. It comes back by itself, whatever happened, and rests while nobody looks at the page.

const QUIET_MS = 4000; // the gateway speaks every second
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 4000;
const HIDDEN_MS = 30_000;

/** `onSnapshot` gets each one, `onLost` hears once that there are none for a while, `onRefused` that none may come. */
export class Stream {
  constructor(url, { onSnapshot, onLost, mayOpen, onRefused }) {
    this.url = url;
    this.onSnapshot = onSnapshot;
    this.onLost = onLost;
    this.mayOpen = mayOpen;
    this.onRefused = onRefused;
    this.source = null;
    this.timer = null;
    this.wait = FIRST_WAIT_MS;
    document.addEventListener("visibilitychange", () => this.looked());
  }

  open() {
    this.close();
    const source = new EventSource(this.url);
    this.source = source;
    this.expect();
    source.onmessage = (event) => {
      this.wait = FIRST_WAIT_MS;
      this.expect();
      this.onSnapshot(JSON.parse(event.data));
    };
    source.onerror = () => this.lost();
  }

  close() {
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
  }

  /** A connection that is dead says nothing: not even that. */
  expect() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.lost(), QUIET_MS);
  }

  lost() {
    this.close();
    this.onLost();
    this.timer = setTimeout(() => this.again(), this.wait);
    this.wait = Math.min(this.wait * 2, LONGEST_WAIT_MS);
  }

  /** Asks first whether it may: a stream does not tell why it was refused. */
  async again() {
    let may;
    try {
      may = await this.mayOpen();
    } catch {
      this.lost();
      return;
    }
    if (may) this.open();
    else this.onRefused();
  }

  looked() {
    if (!document.hidden) {
      clearTimeout(this.resting);
      if (this.rests) {
        this.rests = false;
        this.open();
      }
    } else if (this.source) {
      this.resting = setTimeout(() => {
        this.rests = true;
        this.close();
      }, HIDDEN_MS);
    }
  }
}
